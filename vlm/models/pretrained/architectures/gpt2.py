"""GPT-2 (Radford et al. 2019), alone or with cross-attention to an encoder."""

from torch import nn

from vlm.models.decoder import Decoder
from vlm.models.pretrained.architecture import Architecture, Export, Model
from vlm.models.pretrained.export import export_stack
from vlm.models.pretrained.fields import choice, integer, number
from vlm.models.pretrained.stack import ACTIVATIONS, Part, Paths, Stack, layers
from vlm.nn.position import RotaryPositions

GPT2_LAYERS: Paths = {
    "norm1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
CROSS_LAYERS: Paths = {
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
        **layers(GPT2_LAYERS, "h"),
    },
    extra=layers(CROSS_LAYERS, "h"),
    head={"token_embed.weight": "transformer.wte.weight|wte.weight|lm_head.weight"},
    unused=tuple(f"h.*.{layer}.{mask}" for layer in ("attn", "crossattention") for mask in ("bias", "masked_bias")),
    needed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True},
    # Whether the decoder cross-attends shows in its tensors; the others are of a head that ours has not.
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
    written={**dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0), "tie_word_embeddings": True},
    transposed=True,
)


def export(model: nn.Module) -> Export | None:
    if type(model) is not Decoder or isinstance(model.positions, RotaryPositions):  # rotary positions are Llama's
        return None
    config, tensors = export_stack(GPT2, model, "model")
    named = {f"{GPT2.prefix}{name}": tensor for name, tensor in tensors.items()}
    return config | {"architectures": ["GPT2LMHeadModel"]}, named


GPT2_ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": Part(GPT2, config)},
    models={"GPT2LMHeadModel": Model("language_modeling", lambda config, parts: parts["decoder"])},
    unused=("score.weight", "classifier.{kind}", "qa_outputs.{kind}", "multiple_choice_head.summary.{kind}"),
    export=export,
)
