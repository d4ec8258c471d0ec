"""Text-to-text models: T5 and Marian, the architecture of OPUS-MT."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import TextToText
from vlm.models.pretrained.architecture import Architecture, Export, Model, make_spec, specify_translator
from vlm.models.pretrained.architectures.language_models import LLAMA_ACTIVATIONS
from vlm.models.pretrained.export import export_stack
from vlm.models.pretrained.fields import Entry, Fields, choice, flag, integer, number
from vlm.models.pretrained.stack import (
    ACTIVATIONS,
    Names,
    Part,
    Paths,
    Stack,
    StackArguments,
    Weight,
    expand_layers,
)
from vlm.models.text_encoder import TextEncoder
from vlm.nn.position import BucketedBias, SplitSinusoids
from vlm.untrusted.sizes import JsonValue

T5_ACTIVATIONS = ACTIVATIONS | {f"gated-{theirs}": ours for theirs, ours in LLAMA_ACTIVATIONS.items()}
T5_ACTIVATIONS["gated-gelu"] = "geglu_tanh"  # legacy name of the tanh approximation, as transformers reads it
T5_LAYERS: Paths = {
    "norm1": "layer.0.layer_norm",
    "attn.qkv": tuple(f"layer.0.SelfAttention.{part}" for part in "qkv"),
    "attn.proj": "layer.0.SelfAttention.o",
}
T5_CROSS_LAYERS: Paths = {
    "norm_cross": "layer.1.layer_norm",
    "cross_attn.q": "layer.1.EncDecAttention.q",
    "cross_attn.kv": ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
    "cross_attn.proj": "layer.1.EncDecAttention.o",
}
EMBEDDING = "shared.weight|encoder.embed_tokens.weight|decoder.embed_tokens.weight"  # copies of one tensor
BUCKETS, FURTHEST = "relative_attention_num_buckets", "relative_attention_max_distance"
TIED, SCALED = "tie_word_embeddings", "scale_decoder_outputs"
T5_SIZES = {
    "dim": integer("d_model", 512),
    "depth": integer("num_layers", 6, high=1000),
    "num_heads": integer("num_heads", 8),
    "head_dim": integer("d_kv", 64),
    "hidden": integer("d_ff", 2048),
    "activation": choice("feed_forward_proj", "relu", T5_ACTIVATIONS),
    "norm": "rms",
    "norm_eps": number("layer_norm_epsilon", 1e-6),
    "attn_scale": 1.0,
    "bias": False,
    "vocab_size": integer("vocab_size", 32128),
    "max_len": integer("n_positions", 512),
}


def name_t5_mlp(layer: int, *, gated: bool) -> Paths:
    """Returns the names of a block's MLP, given its index among the block's layers."""
    inner, outer = ("wi_0", "wi_1") if gated else ("wi",), f"layer.{layer}.DenseReluDense"
    return {
        "norm2": f"layer.{layer}.layer_norm",
        "mlp.fc1": tuple(f"{outer}.{name}" for name in inner),
        "mlp.fc2": f"{outer}.wo",
    }


def name_t5_tensors(side: str, paths: Paths, embedding: str) -> Names:
    bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return {
        "token_embed.weight": embedding,
        "positions.weight": Weight((bias,), torch.t, torch.t),
        "norm": f"{side}.final_layer_norm",
        **expand_layers(paths, f"{side}.block"),
    }


def read_t5_positions(sizes: StackArguments, config: Fields, *, causal: bool = False) -> StackArguments:
    buckets, furthest = config.read(integer(BUCKETS, 32)), config.read(integer(FURTHEST, 128))
    bias = {"num_heads": sizes["num_heads"], "buckets": buckets, "furthest": furthest, "causal": causal}
    return {"positions": make_spec("BucketedBias", **bias)}


def read_t5_decoder_arguments(sizes: StackArguments, config: Fields) -> StackArguments:
    """Positions, and a head that is tied and scaled or, from version 1.1 on, untied."""
    # Newer folders state whether the head is scaled; in older ones it follows from a tied head.
    scaled = config.read(flag("scale_decoder_outputs"))
    scaled = config.read(flag("tie_word_embeddings", True)) if scaled is None else scaled
    head = {"dim": sizes["dim"], "vocab_size": sizes["vocab_size"]}
    head |= {"scale": sizes["dim"] ** -0.5} if scaled else {"tied": False}
    return read_t5_positions(sizes, config, causal=True) | {"vocabulary_head": make_spec("VocabularyHead", **head)}


T5_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
T5_ENCODER = Stack(
    kind=TextEncoder,
    model_type="t5",
    sizes=T5_SIZES | {"token_types": None},
    more=read_t5_positions,
    names={},
    aliases=T5_ALIASES,
    needed={"is_encoder_decoder": True},
)
T5_DECODER = Stack(
    kind=Decoder,
    model_type="t5",
    sizes=T5_SIZES,
    more=read_t5_decoder_arguments,
    names={},
    # In the folders of the first T5; no version of transformers uses it.
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)


def read_t5_parts(config: Fields) -> dict[str, Part]:
    stated = str(config.get("feed_forward_proj", "relu"))
    gated = stated.startswith("gated-")
    # Newer folders also have what follows from feed_forward_proj; other values would replace it.
    activation = "gelu_new" if stated == "gated-gelu" else stated.removeprefix("gated-")
    config.require({"is_gated_act": gated, "dense_act_fn": activation}, f"an MLP of {stated:.40}")
    shared = config.read(flag("tie_word_embeddings", True))
    embedding = f"{EMBEDDING}|lm_head.weight" if shared else EMBEDDING
    encoder = name_t5_tensors("encoder", {**T5_LAYERS, **name_t5_mlp(1, gated=gated)}, embedding)
    decoder = name_t5_tensors("decoder", {**T5_LAYERS, **T5_CROSS_LAYERS, **name_t5_mlp(2, gated=gated)}, embedding)
    head = {"vocabulary_head.own.weight": embedding if shared else "lm_head.weight"}
    depth = config.get("num_decoder_layers") or config.get("num_layers", 6)
    return {
        "encoder": Part(replace(T5_ENCODER, names=encoder), config),
        "decoder": Part(replace(T5_DECODER, names=decoder, head=head), config | {"num_layers": depth}),
    }


def export_t5(model: nn.Module) -> Export | None:
    """Exports a T5ForConditionalGeneration.

    Raises:
        UserError: Encoder and decoder have different embeddings, or the head is neither tied and scaled nor untied.
    """
    if type(model) is not TextToText or type(getattr(model.decoder, "positions", None)) is not BucketedBias:
        return None
    encoder: Any = model.encoder
    decoder: Any = model.decoder
    if not torch.equal(encoder.token_embed.weight, decoder.token_embed.weight):
        raise UserError(
            "model.encoder.token_embed: differs from that of the decoder, which T5 shares; use --to safetensors"
        )
    head = decoder.vocabulary_head
    shared = head is None or head.own is None
    scaled = head is not None and head.scale != 1
    if head is not None and (head.bias is not None or head.activation is not None or shared != scaled):
        raise UserError("model.decoder.vocabulary_head: is neither T5's tied and scaled head nor its untied one")
    if head is None:
        raise UserError("model.decoder.vocabulary_head: is not set, and T5 scales a tied head; use --to safetensors")
    bias = decoder.positions
    common: dict[str, JsonValue] = {
        TIED: shared,
        SCALED: scaled,
        "is_encoder_decoder": True,
        BUCKETS: bias.buckets,
        FURTHEST: bias.furthest,
    }
    activation = T5_SIZES["activation"].write(encoder.blocks[0].config.activation)  # type: ignore[attr-defined]
    described = Fields(common | {"feed_forward_proj": activation}, "model")
    config: dict[str, JsonValue] = {"architectures": ["T5ForConditionalGeneration"]}
    tensors: dict[str, Tensor] = {}
    depths = {}
    for place, part in read_t5_parts(described).items():
        own, weights = export_stack(
            part.stack, getattr(model, place), f"model.{place}", head=lambda head: True, more=common
        )
        depths[place] = own["num_layers"]
        config |= own
        tensors |= weights
    config |= {"num_layers": depths["encoder"], "num_decoder_layers": depths["decoder"]}
    return config, tensors | ({} if shared else {"lm_head.weight": head.own.weight})


T5_ARCHITECTURE = Architecture(
    parts=read_t5_parts,
    models={
        name: Model("translation", specify_translator) for name in ("T5ForConditionalGeneration", "T5WithLMHeadModel")
    },
    unused=("qa_outputs.{kind}",),
    omits_bos=True,
    export=export_t5,
)


BART_LAYERS: Paths = {
    "norm1": "self_attn_layer_norm",
    "attn.qkv": tuple(f"self_attn.{part}_proj" for part in "qkv"),
    "attn.proj": "self_attn.out_proj",
    "norm2": "final_layer_norm",
    "mlp.fc1": "fc1",
    "mlp.fc2": "fc2",
}
NEUTRAL_KEYS = ("extra_pos_embeddings", "is_encoder_decoder")
MARIAN_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}
# Options of BART, of which Marian's code was a part.
OLD_OPTIONS = dict.fromkeys(
    ("add_bias_logits", "add_final_layer_norm", "normalize_before", "normalize_embedding", "is_decoder"), False
) | {"static_position_embeddings": True, "force_bos_token_to_be_generated": False}
# The copies of the embedding, of which a folder holds one or more: with one vocabulary, and with one per language.
SHARED = "model.shared.weight|model.encoder.embed_tokens.weight|model.decoder.embed_tokens.weight|lm_head.weight"
EMBEDDINGS = {
    "encoder": "model.encoder.embed_tokens.weight",
    "decoder": "model.decoder.embed_tokens.weight|lm_head.weight",
}
BART_CROSS_LAYERS: Paths = {
    "norm_cross": "encoder_attn_layer_norm",
    "cross_attn.q": "encoder_attn.q_proj",
    "cross_attn.kv": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross_attn.proj": "encoder_attn.out_proj",
}


def make_bart_sizes(side: str, **defaults: int) -> dict[str, Entry | float]:
    """Returns the sizes of a stack of BART, whose keys begin with "encoder" or "decoder".

    Args:
        defaults: Defaults of `vocab_size` and `max_len`.
    """
    return {
        "dim": integer("d_model", 1024),
        "depth": integer(f"{side}_layers", 12, high=1000),
        "num_heads": integer(f"{side}_attention_heads", 16),
        "hidden": integer(f"{side}_ffn_dim", 4096),
        "activation": choice("activation_function", "gelu", ACTIVATIONS),
        "norm_eps": 1e-5,
        "pre_norm": False,
        "vocab_size": integer("vocab_size", defaults["vocab_size"]),
        "max_len": integer("max_position_embeddings", defaults["max_len"]),
    }


def read_embed_scale(sizes: StackArguments, config: Fields) -> float:
    """Reads the factor of the token embeddings."""
    return sizes["dim"] ** 0.5 if config.read(flag("scale_embedding", False)) else 1.0


def read_marian_arguments(sizes: StackArguments, config: Fields) -> StackArguments:
    return {
        "positions": make_spec("SplitSinusoids", dim=sizes["dim"], base=10_000.0, first=0),
        "embed_scale": read_embed_scale(sizes, config),
    }


def name_marian_tensors(side: str) -> Names:
    return {"token_embed.weight": "shared.weight", **expand_layers(BART_LAYERS, f"{side}.layers")}


MARIAN = {
    "encoder": Stack(
        kind=TextEncoder,
        model_type="marian",
        prefix="model.",
        sizes=make_bart_sizes("encoder", vocab_size=58101, max_len=1024) | {"token_types": None},
        more=read_marian_arguments,
        aliases=MARIAN_ALIASES,
        names=name_marian_tensors("encoder"),
        head={"token_embed.weight": SHARED},
        unused=("encoder.embed_positions.weight",),
    ),
    "decoder": Stack(
        kind=Decoder,
        model_type="marian",
        prefix="model.",
        sizes=make_bart_sizes("decoder", vocab_size=58101, max_len=1024),
        more=lambda sizes, config: {
            **read_marian_arguments(sizes, config),
            "vocabulary_head": make_spec("VocabularyHead", dim=sizes["dim"], vocab_size=sizes["vocab_size"], bias=True),
        },
        names={**name_marian_tensors("decoder"), **expand_layers(BART_CROSS_LAYERS, "decoder.layers")},
        head={
            "token_embed.weight": SHARED,
            "vocabulary_head.bias": Weight(("final_logits_bias",), lambda bias: bias[0], lambda bias: bias[None]),
        },
        unused=("decoder.embed_positions.weight",),
        needed={"tie_word_embeddings": True, **OLD_OPTIONS},
        neutral_keys=NEUTRAL_KEYS,
    ),
}


def read_marian_parts(config: Fields) -> dict[str, Part]:
    """Reads the parts of both stacks.

    Raises:
        UserError: The languages have separate vocabularies.
    """
    if config.get("decoder_vocab_size") not in (None, config.get("vocab_size", 58101)):
        raise config.error("decoder_vocab_size", "not vocab_size, where our models share one vocabulary")
    if config.read(flag("share_encoder_decoder_embeddings", True)):
        return {place: Part(stack, config) for place, stack in MARIAN.items()}
    return {
        place: Part(replace(stack, head={**stack.head, "token_embed.weight": EMBEDDINGS[place]}), config)
        for place, stack in MARIAN.items()
    }


def export_marian(model: nn.Module) -> Export | None:
    """Exports a MarianMTModel, with separate embeddings of encoder and decoder if they differ."""
    if type(model) is not TextToText or not isinstance(getattr(model.decoder, "positions", None), SplitSinusoids):
        return None
    config: dict[str, JsonValue] = {"architectures": ["MarianMTModel"], "is_encoder_decoder": True}
    tensors: dict[str, Tensor] = {}
    for place, stack in MARIAN.items():
        module: Any = getattr(model, place)
        more = {"scale_embedding": module.embed_scale != 1}
        # Their head is the token embedding with a bias.
        stack_config, weights = export_stack(
            stack,
            module,
            f"model.{place}",
            head=lambda head: head.bias is not None and head.activation is None and head.scale == 1,
            more=more,
        )
        config |= stack_config
        tensors |= {f"{stack.prefix}{name}": weight for name, weight in weights.items()}
    sides: Any = (model.encoder, model.decoder)
    source, target = (side.token_embed.weight for side in sides)
    if not (shared := torch.equal(source, target)):
        del tensors["model.shared.weight"]
        for place, weight in (("encoder", source), ("decoder", target)):
            tensors |= dict.fromkeys(EMBEDDINGS[place].split("|"), weight)
    head: Any = model.decoder.vocabulary_head
    bias = target.new_zeros(len(target)) if head is None else head.bias
    config["share_encoder_decoder_embeddings"] = shared
    return config, tensors | {"final_logits_bias": bias[None]}


MARIAN_ARCHITECTURE = Architecture(
    parts=read_marian_parts,
    export=export_marian,
    models={"MarianMTModel": Model("translation", specify_translator)},
    omits_bos=True,
)

ARCHITECTURES = {
    "marian": MARIAN_ARCHITECTURE,
    "t5": T5_ARCHITECTURE,
}
