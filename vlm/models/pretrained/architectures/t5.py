"""T5 (Raffel et al. 2020) and version 1.1, with gated MLPs and an untied head, such as FLAN-T5 (Chung et al. 2022)."""

from dataclasses import replace
from typing import Any

import torch

from vlm.models.decoder import Decoder
from vlm.models.pretrained.architecture import Architecture, Model, spec_of, translator
from vlm.models.pretrained.architectures.llama import LLAMA_ACTIVATIONS as GATED
from vlm.models.pretrained.fields import Fields, choice, flag, integer, number
from vlm.models.pretrained.stack import ACTIVATIONS as UNGATED
from vlm.models.pretrained.stack import Names, Part, Paths, Stack, Weight, layers
from vlm.models.text_encoder import TextEncoder

T5_ACTIVATIONS = UNGATED | {f"gated-{theirs}": ours for theirs, ours in GATED.items()}
T5_ACTIVATIONS["gated-gelu"] = "geglu_tanh"  # legacy, as theirs reads it
ATTENTION: Paths = {
    "norm1": "layer.0.layer_norm",
    "attn.qkv": tuple(f"layer.0.SelfAttention.{part}" for part in "qkv"),
    "attn.proj": "layer.0.SelfAttention.o",
}
CROSS_ATTENTION: Paths = {
    "norm_cross": "layer.1.layer_norm",
    "cross_attn.q": "layer.1.EncDecAttention.q",
    "cross_attn.kv": ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"),
    "cross_attn.proj": "layer.1.EncDecAttention.o",
}
EMBEDDING = "shared.weight|encoder.embed_tokens.weight|decoder.embed_tokens.weight"  # copies of one tensor
BUCKETS, FURTHEST = "relative_attention_num_buckets", "relative_attention_max_distance"
SIZES: dict[str, Any] = {
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


def mlp(layer: int, *, gated: bool) -> Paths:
    """The names of a block's MLP, given its index among the block's layers."""
    inner, outer = ("wi_0", "wi_1") if gated else ("wi",), f"layer.{layer}.DenseReluDense"
    return {
        "norm2": f"layer.{layer}.layer_norm",
        "mlp.fc1": tuple(f"{outer}.{name}" for name in inner),
        "mlp.fc2": f"{outer}.wo",
    }


def t5_names(side: str, paths: Paths, embedding: str) -> Names:
    bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return {
        "token_embed.weight": embedding,
        "positions.weight": Weight((bias,), torch.t, torch.t),
        "norm": f"{side}.final_layer_norm",
        **layers(paths, f"{side}.block"),
    }


def positions(sizes: dict[str, Any], config: Fields, *, causal: bool = False) -> dict[str, Any]:
    buckets, furthest = config.read(integer(BUCKETS, 32)), config.read(integer(FURTHEST, 128))
    bias = {"num_heads": sizes["num_heads"], "buckets": buckets, "furthest": furthest, "causal": causal}
    return {"positions": spec_of("BucketedBias", **bias)}


def positions_and_head(sizes: dict[str, Any], config: Fields) -> dict[str, Any]:
    """Positions, and a head that is tied and scaled or, from version 1.1 on, untied."""
    head = {"dim": sizes["dim"], "vocab_size": sizes["vocab_size"]}
    head |= {"scale": sizes["dim"] ** -0.5} if scales(config) else {"tied": False}
    return positions(sizes, config, causal=True) | {"vocabulary_head": spec_of("VocabularyHead", **head)}


def scales(config: Fields) -> bool:
    """Returns True if the head is scaled. Newer folders state it; in older ones it follows from a tied head."""
    stated = config.read(flag("scale_decoder_outputs"))
    return config.read(flag("tie_word_embeddings", True)) if stated is None else stated


T5_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}
T5_ENCODER = Stack(
    kind=TextEncoder,
    model_type="t5",
    sizes=SIZES | {"token_types": None},
    more=positions,
    names={},
    aliases=T5_ALIASES,
    needed={"is_encoder_decoder": True},
)
T5_DECODER = Stack(
    kind=Decoder,
    model_type="t5",
    sizes=SIZES,
    more=positions_and_head,
    names={},
    # Without an effect in all versions of transformers, and in the folders of the first T5.
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)


def t5_parts(config: Fields) -> dict[str, Part]:
    stated = str(config.get("feed_forward_proj", "relu"))
    gated = stated.startswith("gated-")
    # Newer folders also have what follows from feed_forward_proj; other values would replace it.
    activation = "gelu_new" if stated == "gated-gelu" else stated.removeprefix("gated-")
    config.require({"is_gated_act": gated, "dense_act_fn": activation}, f"an MLP of {stated:.40}")
    shared = config.read(flag("tie_word_embeddings", True))
    embedding = f"{EMBEDDING}|lm_head.weight" if shared else EMBEDDING
    encoder = t5_names("encoder", {**ATTENTION, **mlp(1, gated=gated)}, embedding)
    decoder = t5_names("decoder", {**ATTENTION, **CROSS_ATTENTION, **mlp(2, gated=gated)}, embedding)
    head = {"vocabulary_head.own.weight": embedding if shared else "lm_head.weight"}
    depth = config.get("num_decoder_layers") or config.get("num_layers", 6)
    return {
        "encoder": Part(replace(T5_ENCODER, names=encoder), config),
        "decoder": Part(replace(T5_DECODER, names=decoder, head=head), config | {"num_layers": depth}),
    }


T5_ARCHITECTURE = Architecture(
    parts=t5_parts,
    models={name: Model("translation", translator) for name in ("T5ForConditionalGeneration", "T5WithLMHeadModel")},
    unused=("qa_outputs.{kind}",),
    bare=True,
)
