"""Language models: GPT-2, Llama, Qwen2, Qwen3 and Gemma."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from vlm.models.decoder import Decoder
from vlm.models.pretrained.architecture import LANGUAGE_MODEL, Architecture, Export, make_spec
from vlm.models.pretrained.export import export_stack
from vlm.models.pretrained.fields import REQUIRED, Fields, choice, flag, integer, number
from vlm.models.pretrained.stack import ACTIVATIONS, Part, Paths, Stack, StackArguments, expand_layers
from vlm.nn.position import RotaryPositions

GPT2_LAYERS: Paths = {
    "norm1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
GPT2_CROSS_LAYERS: Paths = {
    "norm_cross": "ln_cross_attn",
    "cross_attn.q": "crossattention.q_attn",
    "cross_attn.kv": "crossattention.c_attn",
    "cross_attn.proj": "crossattention.c_proj",
}
GPT2 = Stack(
    kind=Decoder,
    model_type="gpt2",
    prefix="transformer.",
    sizes={
        "dim": integer("n_embd", 768),
        "depth": integer("n_layer", 12, high=1000),
        "num_heads": integer("n_head", 12),
        "hidden": integer("n_inner"),
        "activation": choice("activation_function", "gelu_new", ACTIVATIONS),
        "norm_eps": number("layer_norm_epsilon", 1e-5),
        "vocab_size": integer("vocab_size", 50257),
        "max_len": integer("n_positions", 1024),
    },
    names={
        "token_embed.weight": "wte.weight",
        "positions.weight": "wpe.weight",
        "norm": "ln_f",
        **expand_layers(GPT2_LAYERS, "h"),
    },
    extra=expand_layers(GPT2_CROSS_LAYERS, "h"),
    head={"token_embed.weight": "transformer.wte.weight|wte.weight|lm_head.weight"},
    unused=tuple(f"h.*.{layer}.{mask}" for layer in ("attn", "crossattention") for mask in ("bias", "masked_bias")),
    needed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True},
    # Whether the decoder cross-attends follows from its tensors; `summary_*` belong to a head that our Decoder lacks.
    neutral_keys=(
        *("add_cross_attention", "is_decoder", "reorder_and_upcast_attn", "summary_activation"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
    ),
    aliases={
        "n_ctx": "n_positions",
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    exported={**dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0), "tie_word_embeddings": True},
    transposed=True,
)


def export_gpt2(model: nn.Module) -> Export | None:
    if type(model) is not Decoder or isinstance(model.positions, RotaryPositions):  # rotary positions are Llama's
        return None
    config, tensors = export_stack(GPT2, model, "model")
    named = {f"{GPT2.prefix}{name}": tensor for name, tensor in tensors.items()}
    return config | {"architectures": ["GPT2LMHeadModel"]}, named


GPT2_ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": Part(GPT2, config)},
    models={"GPT2LMHeadModel": LANGUAGE_MODEL},
    unused=("score.weight", "classifier.{kind}", "qa_outputs.{kind}", "multiple_choice_head.summary.{kind}"),
    export=export_gpt2,
)


SCALINGS = {"default": None, "linear": "linear", "llama3": "llama3"}
FREQUENCIES, ORIGINAL_MAX_LEN = ("low_freq_factor", "high_freq_factor"), "original_max_position_embeddings"
GATED_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
LLAMA_ACTIVATIONS = {
    theirs: GATED_ACTIVATIONS[ours] for theirs, ours in ACTIVATIONS.items() if ours in GATED_ACTIVATIONS
}
# Of the data and the training code of Llama 1 and Idefics3's decoders.
LLAMA_NEUTRAL_KEYS = ("max_sequence_length", "num_image_tokens", "perceiver_config", "pixel_shuffle_factor")
CLASS_HEAD = ("score.{kind}",)
LLAMA_LAYERS: Paths = {
    "norm1": "input_layernorm",
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": "self_attn.o_proj",
    "norm2": "post_attention_layernorm",
    "mlp.fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.fc2": "mlp.down_proj",
}


def read_rotary_and_head(sizes: StackArguments, config: Fields, *, tied: bool = False) -> StackArguments:
    """Arguments for rotary positions, and for an untied head if there is one."""
    head_dim = sizes["head_dim"] or sizes["dim"] // sizes["num_heads"]
    if head_dim % 2:
        key = "head_dim" if sizes["head_dim"] else "hidden_size"
        raise config.error(key, f"which makes heads of {head_dim}, but rotary positions need an even head size")
    rotary = make_spec("RotaryPositions", head_dim=head_dim, **_read_rotary(config, sizes["max_len"]))
    if config.read(flag("tie_word_embeddings", tied)):
        return {"positions": rotary}
    head = make_spec("VocabularyHead", dim=sizes["dim"], vocab_size=sizes["vocab_size"], tied=False)
    return {"positions": rotary, "vocabulary_head": head}


def _read_rotary(config: Fields, max_len: int) -> dict[str, str | float]:
    """Options of rotary positions, from rope_parameters or, in most published folders, rope_theta and rope_scaling."""
    # As transformers reads them: an empty object counts as missing, and keys inside the object come first.
    name = next((key for key in ("rope_scaling", "rope_parameters") if config.values.get(key)), "")
    rope = config.part(name, {})
    outer = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor", ORIGINAL_MAX_LEN) if key in config}
    for key, value in outer.items():
        if rope.get(key, value) != value:
            raise config.error(key, f"and {name}.{key} is {rope.get(key)!r:.60}")
    rope |= outer
    old_type = rope.get("type", "default")  # many folders state both
    if "rope_type" not in rope:
        rope |= {"rope_type": old_type}
    rope.require({"partial_rotary_factor": 1.0}, "our RotaryPositions")
    scaling = rope.read(choice("rope_type", "default", SCALINGS))
    options: dict[str, str | float] = {"base": float(rope.read(number("rope_theta", 10_000.0, 1, 1e12)))}
    if scaling is None:
        return options
    options |= {"scaling": scaling, "factor": float(rope.read(number("factor", REQUIRED, 1, 1e4)))}
    if scaling == "llama3":
        options |= {name: float(rope.read(number(name, REQUIRED, 1e-3, 1e6))) for name in FREQUENCIES}
        options["trained_len"] = rope.read(integer(ORIGINAL_MAX_LEN, max_len))
    return options


LLAMA = Stack(
    kind=Decoder,
    model_type="llama",
    prefix="model.",
    sizes={
        "dim": integer("hidden_size", 4096),
        "depth": integer("num_hidden_layers", 32, high=1000),
        "num_heads": integer("num_attention_heads", 32),
        "num_kv_heads": integer("num_key_value_heads"),
        "head_dim": integer("head_dim"),
        "hidden": integer("intermediate_size", 11008),
        "activation": choice("hidden_act", "silu", LLAMA_ACTIVATIONS),
        "norm": "rms",
        "norm_eps": number("rms_norm_eps", 1e-6),
        "bias": False,
        "vocab_size": integer("vocab_size", 32000),
        "max_len": integer("max_position_embeddings", 2048),
    },
    more=read_rotary_and_head,
    names={"token_embed": "embed_tokens", "norm": "norm", **expand_layers(LLAMA_LAYERS, "layers")},
    head={
        "token_embed.weight": "model.embed_tokens.weight|embed_tokens.weight|lm_head.weight",
        "vocabulary_head.own": "lm_head",
    },
    unused=("rotary_emb.inv_freq", "layers.*.self_attn.rotary_emb.inv_freq"),
    needed={"attention_bias": False, "mlp_bias": False},
    neutral_keys=LLAMA_NEUTRAL_KEYS,
)


class DecoderClass(NamedTuple):
    """A class of decoders that is recognised by options of its blocks.

    Args:
        name: Name of the Hugging Face class.
    """

    name: str
    options: dict[str, Any]


# By model type.
DECODER_CLASSES = {
    "gemma": DecoderClass("GemmaForCausalLM", {"norm": "rms_plus_one"}),
    "llama": DecoderClass("LlamaForCausalLM", {"norm": "rms", "qk_norm": False, "qkv_bias": None}),
    "qwen2": DecoderClass("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": DecoderClass("Qwen3ForCausalLM", {"qk_norm": "rms"}),
}


def export_decoder(model: nn.Module, stack: Stack, *, key: str = "model", has_prefix: bool = False) -> Export | None:
    """Exports a decoder with rotary positions; returns None if its blocks are not those of the stack's class.

    Args:
        key, has_prefix: See `export_stack`.
    """
    name, options = DECODER_CLASSES[stack.model_type]
    if type(model) is not Decoder or type(model.positions) is not RotaryPositions:
        return None
    block: Any = model.blocks[0]
    if any(getattr(block.config, name) != value for name, value in options.items()):
        return None
    head: Any = model.vocabulary_head
    untied = head is not None and head.own is not None
    rotary, rope = model.positions.options, None
    if "scaling" in rotary:
        rope = {"rope_type": rotary["scaling"], "factor": rotary["factor"]}
        if "trained_len" in rotary:
            rope |= {name: rotary[name] for name in FREQUENCIES} | {ORIGINAL_MAX_LEN: rotary["trained_len"]}
    more = {"tie_word_embeddings": not untied, "rope_theta": rotary["base"], "rope_scaling": rope}
    config, tensors = export_stack(
        stack,
        model,
        key,
        head=lambda head: head.parts(torch.empty(0))[1:] == (None, None),
        more=more,
        has_prefix=has_prefix,
    )
    named = {f"{stack.prefix}{name}": tensor for name, tensor in tensors.items()}
    return config | {"architectures": [name]}, named | ({"lm_head.weight": head.own.weight} if untied else {})


LLAMA_ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": Part(LLAMA, config)},
    models={"LlamaForCausalLM": LANGUAGE_MODEL},
    unused=CLASS_HEAD,
    export=lambda model: export_decoder(model, LLAMA),
)


QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    sizes={
        **{name: size for name, size in LLAMA.sizes.items() if name != "head_dim"},
        "num_kv_heads": integer("num_key_value_heads", 32),
        "hidden": integer("intermediate_size", 22016),
        "qkv_bias": True,
        "vocab_size": integer("vocab_size", 151936),
        "max_len": integer("max_position_embeddings", 32768),
    },
    needed={"use_sliding_window": False},
    neutral_keys=("sliding_window", "max_window_layers"),  # of sliding windows, which are off
)


def require_full_attention(stack: Stack, config: Fields) -> Part:
    """Returns the stack's part.

    Raises:
        UserError: A layer has another attention than full attention.
    """
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise config.error("layer_types", "where our Decoder supports full_attention only")
    return Part(stack, config)


QWEN2_ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": require_full_attention(QWEN2, config)},
    models={"Qwen2ForCausalLM": LANGUAGE_MODEL},
    unused=CLASS_HEAD,
    export=lambda model: export_decoder(model, QWEN2),
)


QWEN3 = replace(
    QWEN2,
    model_type="qwen3",
    sizes={**QWEN2.sizes, "head_dim": integer("head_dim", 128), "qkv_bias": None, "qk_norm": "rms"},
    names={**LLAMA.names, **{f"blocks.*.attn.head_norm.{part}": f"layers.*.self_attn.{part}_norm" for part in "qk"}},
    needed={**QWEN2.needed, "attention_bias": False},
)
QWEN3_ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": require_full_attention(QWEN3, config)},
    models={"Qwen3ForCausalLM": LANGUAGE_MODEL},
    unused=CLASS_HEAD,
    export=lambda model: export_decoder(model, QWEN3),
)


# The first release states "gelu", but means and was trained with the tanh approximation.
LEGACY_GELU = "gelu"
GEMMA_ACTIVATIONS = {theirs: ours for theirs, ours in LLAMA_ACTIVATIONS.items() if theirs != LEGACY_GELU} | {
    LEGACY_GELU: "geglu_tanh"
}
HIDDEN_ACTIVATION = choice("hidden_activation", None, GEMMA_ACTIVATIONS)


def read_gemma_arguments(sizes: StackArguments, config: Fields) -> StackArguments:
    """Arguments for rotary positions, the head and scaled embeddings.

    Raises:
        UserError: Both keys of the activation are given and differ; each of them has had precedence in some version of
            transformers.
    """
    if config.read(HIDDEN_ACTIVATION) not in (None, sizes["activation"]):
        raise config.error(HIDDEN_ACTIVATION.name, "which contradicts hidden_act")
    return {**read_rotary_and_head(sizes, config, tied=True), "embed_scale": sizes["dim"] ** 0.5}


GEMMA = replace(
    LLAMA,
    model_type="gemma",
    sizes={
        **LLAMA.sizes,
        "dim": integer("hidden_size", 3072),
        "depth": integer("num_hidden_layers", 28, high=1000),
        "num_heads": integer("num_attention_heads", 16),
        "num_kv_heads": integer("num_key_value_heads", 16),
        "head_dim": integer("head_dim", 256),
        "hidden": integer("intermediate_size", 24576),
        "activation": choice("hidden_act", "gelu_pytorch_tanh", GEMMA_ACTIVATIONS),
        "norm": "rms_plus_one",
        "vocab_size": integer("vocab_size", 256000),
        "max_len": integer("max_position_embeddings", 8192),
    },
    more=read_gemma_arguments,
    needed={"attention_bias": False, "use_bidirectional_attention": None},
)
GEMMA_ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": Part(GEMMA, config)},
    models={"GemmaForCausalLM": LANGUAGE_MODEL},
    unused=CLASS_HEAD,
    export=lambda model: export_decoder(model, GEMMA),
)

ARCHITECTURES = {
    "gemma": GEMMA_ARCHITECTURE,
    "gpt2": GPT2_ARCHITECTURE,
    "llama": LLAMA_ARCHITECTURE,
    "qwen2": QWEN2_ARCHITECTURE,
    "qwen3": QWEN3_ARCHITECTURE,
}
