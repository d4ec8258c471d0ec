"""Marian (Junczys-Dowmunt et al. 2018), the architecture of OPUS-MT's translators (Tiedemann and Thottingal 2020)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import TextToText
from vlm.models.heads import VocabularyHead
from vlm.models.pretrained.architecture import Architecture, Export, Model, spec_of, translator
from vlm.models.pretrained.export import export_stack
from vlm.models.pretrained.fields import Fields, choice, flag, integer
from vlm.models.pretrained.stack import ACTIVATIONS, Names, Part, Paths, Stack, Weight, layers
from vlm.models.text_encoder import TextEncoder
from vlm.nn.position import SplitSinusoids

LAYERS: Paths = {
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
CROSS_LAYERS: Paths = {
    "norm_cross": "encoder_attn_layer_norm",
    "cross_attn.q": "encoder_attn.q_proj",
    "cross_attn.kv": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "cross_attn.proj": "encoder_attn.out_proj",
}


def sizes(side: str, **defaults: int) -> dict[str, Any]:
    """The sizes of a stack, whose keys begin with "encoder" or "decoder".

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


def scaled(sizes: dict[str, Any], config: Fields) -> float:
    """The factor of the token embeddings."""
    return sizes["dim"] ** 0.5 if config.read(flag("scale_embedding", False)) else 1.0


def sinusoids(sizes: dict[str, Any], config: Fields) -> dict[str, Any]:
    return {
        "positions": spec_of("SplitSinusoids", dim=sizes["dim"], base=10_000.0, first=0),
        "embed_scale": scaled(sizes, config),
    }


def sinusoids_and_bias(sizes: dict[str, Any], config: Fields) -> dict[str, Any]:
    head = spec_of("VocabularyHead", dim=sizes["dim"], vocab_size=sizes["vocab_size"], bias=True)
    return sinusoids(sizes, config) | {"vocabulary_head": head}


def marian_names(side: str) -> Names:
    return {"token_embed.weight": "shared.weight", **layers(LAYERS, f"{side}.layers")}


MARIAN = {
    "encoder": Stack(
        kind=TextEncoder,
        model_type="marian",
        prefix="model.",
        sizes=sizes("encoder", vocab_size=58101, max_len=1024) | {"token_types": None},
        more=sinusoids,
        aliases=MARIAN_ALIASES,
        names=marian_names("encoder"),
        head={"token_embed.weight": SHARED},
        unused=("encoder.embed_positions.weight",),
    ),
    "decoder": Stack(
        kind=Decoder,
        model_type="marian",
        prefix="model.",
        sizes=sizes("decoder", vocab_size=58101, max_len=1024),
        more=sinusoids_and_bias,
        names={**marian_names("decoder"), **layers(CROSS_LAYERS, "decoder.layers")},
        head={
            "token_embed.weight": SHARED,
            "vocabulary_head.bias": Weight(("final_logits_bias",), lambda bias: bias[0], lambda bias: bias[None]),
        },
        unused=("decoder.embed_positions.weight",),
        needed={"tie_word_embeddings": True, **OLD_OPTIONS},
        neutral_keys=NEUTRAL_KEYS,
    ),
}


def marian_parts(config: Fields) -> dict[str, Part]:
    """The parts of both stacks.

    Raises:
        UserError: The languages have separate vocabularies.
    """
    if config.get("decoder_vocab_size") not in (None, config.get("vocab_size", 58101)):
        raise config.fault("decoder_vocab_size", "another than vocab_size, where our models have one vocabulary")
    if config.read(flag("share_encoder_decoder_embeddings", True)):
        return {place: Part(stack, config) for place, stack in MARIAN.items()}
    return {
        place: Part(replace(stack, head={**stack.head, "token_embed.weight": EMBEDDINGS[place]}), config)
        for place, stack in MARIAN.items()
    }


def export(model: nn.Module) -> Export | None:
    """Exports a MarianMTModel, with separate embeddings of encoder and decoder if they differ."""
    if type(model) is not TextToText or not isinstance(getattr(model.decoder, "positions", None), SplitSinusoids):
        return None
    config: dict[str, Any] = {"architectures": ["MarianMTModel"], "is_encoder_decoder": True}
    tensors: dict[str, Tensor] = {}
    for place, stack in MARIAN.items():
        module: Any = getattr(model, place)
        more = {"scale_embedding": module.embed_scale != 1}
        own, weights = export_stack(stack, module, f"model.{place}", head=biased, more=more)
        config |= own
        tensors |= {f"{stack.prefix}{name}": weight for name, weight in weights.items()}
    sides: Any = (model.encoder, model.decoder)
    read, written = (side.token_embed.weight for side in sides)
    if not (shared := torch.equal(read, written)):
        del tensors["model.shared.weight"]
        tensors |= {"model.encoder.embed_tokens.weight": read, "model.decoder.embed_tokens.weight": written}
        tensors["lm_head.weight"] = written
    head: Any = model.decoder.vocabulary_head
    bias = written.new_zeros(len(written)) if head is None else head.bias
    config["share_encoder_decoder_embeddings"] = shared
    return config, tensors | {"final_logits_bias": bias[None]}


def biased(head: VocabularyHead) -> bool:
    """Returns True if a head is the token embedding with a bias."""
    _, bias, transform = head.parts(torch.empty(0))
    return head.own is None and bias is not None and transform is None


MARIAN_ARCHITECTURE = Architecture(
    parts=marian_parts,
    export=export,
    models={"MarianMTModel": Model("translation", translator)},
    bare=True,
)
