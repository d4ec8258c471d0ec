"""Image captioners and text recognition: BLIP, GIT, TrOCR and VisionEncoderDecoder."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.pretrained.architecture import Architecture, Export, Model, captioner, spec_of
from vlm.models.pretrained.architectures import bert
from vlm.models.pretrained.architectures import text_to_text as marian
from vlm.models.pretrained.architectures import vision as vit
from vlm.models.pretrained.architectures.dual_encoders import CLIP_VISION, SIGLIP_VISION
from vlm.models.pretrained.architectures.language_models import GPT2
from vlm.models.pretrained.architectures.vision import DEIT, VIT
from vlm.models.pretrained.export import export_stack
from vlm.models.pretrained.fields import Fields, flag, integer, number, square
from vlm.models.pretrained.stack import Part, Paths, Stack, Weight, WeightMap, layers, table, token
from vlm.models.vit import ViT

BEFORE = 2  # number of learned positions that precede the first token's


def positions_and_head(sizes: dict[str, Any], config: Fields) -> dict[str, Any]:
    """Arguments for sinusoids if positions are not learned, and for an untied head if there is one."""
    dim = sizes["dim"]
    found: dict[str, Any] = {"embed_scale": marian.scaled(sizes, config)}
    if not config.read(flag("use_learned_position_embeddings", True)):
        first = config.read(integer("pad_token_id", 1, low=0)) + 1
        # As in tensor2tensor, the last wave is the longest: 10,000 ** (-2 i / (D - 2)).
        found["positions"] = spec_of("SplitSinusoids", dim=dim, base=10_000.0 ** (dim / (dim - 2)), first=first)
    if not config.read(flag("tie_word_embeddings", True)):
        found["vocabulary_head"] = spec_of("VocabularyHead", dim=dim, vocab_size=sizes["vocab_size"], tied=False)
    return found


TROCR = Stack(
    kind=Decoder,
    model_type="trocr",
    prefix="model.decoder.",
    sizes={
        **marian.sizes("decoder", vocab_size=50265, max_len=512),
        "embed_norm": flag("layernorm_embedding", True),
    },
    more=positions_and_head,
    names={
        "token_embed.weight": "embed_tokens.weight",
        "positions.weight": Weight(
            ("embed_positions.weight",), lambda rows: rows[BEFORE:], lambda rows: F.pad(rows, (0, 0, BEFORE, 0))
        ),
        "embed_norm": "layernorm_embedding",
        **layers(marian.LAYERS, "layers"),
    },
    unused=("embed_positions._float_tensor",),  # shows older versions the type of the model
    neutral_keys=("add_cross_attention", "cross_attention_hidden_size", "is_decoder"),  # shown by the tensors
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "decoder_attention_heads",
        "num_hidden_layers": "decoder_layers",
    },
    extra=layers(marian.CROSS_LAYERS, "layers"),
    head={
        "token_embed.weight": "model.decoder.embed_tokens.weight|output_projection.weight",
        "vocabulary_head.own.weight": "output_projection.weight",
    },
)
TROCR_ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": Part(TROCR, config)},
    models={"TrOCRForCausalLM": Model("language_modeling", lambda config, parts: parts["decoder"])},
)


VISION_LAYERS: Paths = {
    "norm1": "layer_norm1",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
TEXT_LAYERS: Paths = {
    **bert.BERT_LAYERS,
    "norm_cross": "crossattention.output.LayerNorm",
    "cross_attn.q": "crossattention.self.query",
    "cross_attn.kv": ("crossattention.self.key", "crossattention.self.value"),
    "cross_attn.proj": "crossattention.output.dense",
}
IDS = {"bos_token_id": 30522, "sep_token_id": 102, "pad_token_id": 0}  # [DEC], [SEP] and [PAD]
BLIP_VISION = Stack(
    kind=ViT,
    model_type="blip_vision_model",
    sizes={**vit.VIT.sizes, "image_size": square("image_size", 384), "norm_eps": number("layer_norm_eps", 1e-5)},
    names={
        "class_token": token("embeddings.class_embedding"),
        "positions.weight": table("embeddings.position_embedding"),
        "patch_embed": "embeddings.patch_embedding",
        "norm": "post_layernorm",
        **layers(VISION_LAYERS, "encoder.layers"),
    },
    needed={"num_channels": 3},
    neutral_keys=("projection_dim",),
)


def text_head(sizes: dict[str, Any], config: Fields) -> dict[str, Any]:
    same = {name: sizes[name] for name in ("dim", "vocab_size", "norm_eps")}
    return {"vocabulary_head": spec_of("VocabularyHead", bias=True, transform=sizes["activation"], **same)}


BLIP_TEXT = Stack(
    kind=Decoder,
    model_type="blip_text_model",
    prefix="bert.",
    sizes=bert.TEXT_SIZES
    | {
        "num_heads": integer("num_attention_heads", 8),
        "vocab_size": integer("vocab_size", 30524),
        "context_dim": integer("encoder_hidden_size", 768),
    },
    more=text_head,
    names={**bert.ENTRANCE, **layers(TEXT_LAYERS, "encoder.layer")},
    head={**bert.BERT_PREDICTIONS, **bert.TIED},
    unused=("embeddings.position_ids",),
    needed=bert.NEEDED | {"is_decoder": True, "tie_word_embeddings": True},
    neutral_keys=(
        "add_cross_attention",
        "encoder_hidden_size",
        "projection_dim",
    ),  # cross-attention is as wide as the encoder
)


def generation(config: Fields) -> Fields:
    """Decoding options: those of the decoder's part of config.json, with texts that end with [SEP]."""
    config.require({"tie_word_embeddings": True}, "our Decoder")
    text = config.part("text_config")
    ids = {name: default if name not in text else text.values[name] for name, default in IDS.items()}
    return text | ids | {"decoder_start_token_id": ids["bos_token_id"], "eos_token_id": ids["sep_token_id"]}


BLIP_ARCHITECTURE = Architecture(
    parts=lambda config: {
        "encoder": Part(BLIP_VISION, config.part("vision_config"), "vision_model."),
        "decoder": Part(BLIP_TEXT, config.part("text_config"), "text_decoder."),
    },
    models={"BlipForConditionalGeneration": Model("captioning", captioner)},
    generation=generation,
    neutral_keys=("image_text_hidden_size", "projection_dim"),
    added=("[DEC]", "[ENC]"),
)


GIT_PROJECTION = "visual_projection.visual_projection"
GIT_VISION = replace(CLIP_VISION, sizes={**CLIP_VISION.sizes, "patch_size": square("patch_size", 16)})


def vision_config(config: Fields) -> Fields:
    return config.part("vision_config") if "vision_config" in config else config.part("", {})


def prefix_and_head(sizes: dict[str, Any], config: Fields) -> dict[str, Any]:
    dim, states = sizes["dim"], GIT_VISION.arguments(vision_config(config))
    same = {"dim": dim, "vocab_size": sizes["vocab_size"]}
    own = not config.read(flag("tie_word_embeddings", False))
    norm = {"norm": True, "norm_eps": states["norm_eps"]}
    return {
        "prefix": spec_of("Prefix", dim=dim, context_dim=states["dim"], project=True, **norm),
        "vocabulary_head": spec_of("VocabularyHead", tied=not own, bias=True, **same),
    }


GIT_TEXT = Stack(
    kind=Decoder,
    model_type="git",
    prefix="git.",
    sizes=bert.TEXT_SIZES
    | {
        "depth": integer("num_hidden_layers", 6, high=1000),
        "max_len": integer("max_position_embeddings", 1024),
    },
    more=prefix_and_head,
    names={
        **bert.ENTRANCE,
        **layers(bert.BERT_LAYERS, "encoder.layer"),
        "prefix.project": f"{GIT_PROJECTION}.0",
        "prefix.norm": f"{GIT_PROJECTION}.1",
    },
    head={
        "token_embed.weight": f"git.{bert.WORDS}|{bert.WORDS}|output.weight",
        "vocabulary_head.own": "output",
        "vocabulary_head.bias": "output.bias",
    },
    unused=("embeddings.position_ids",),
    neutral_keys=bert.NEUTRAL_KEYS,
    needed=bert.NEEDED | {"num_image_with_embedding": None},  # used for video
)
GIT_ARCHITECTURE = Architecture(
    parts=lambda config: {
        "encoder": Part(GIT_VISION, vision_config(config), "git.image_encoder."),
        "decoder": Part(GIT_TEXT, config),
    },
    models={"GitForCausalLM": Model("captioning", captioner)},
)


STACKS = {"encoder": (VIT, DEIT, SIGLIP_VISION), "decoder": (GPT2, TROCR)}
VISION_ENCODER_DECODER_PROJECTION = "enc_to_dec_proj"


def parts(config: Fields) -> dict[str, Part]:
    """The parts of encoder and decoder.

    Raises:
        UserError: One is of another kind.
    """
    placed = {}
    for place, stacks in STACKS.items():
        inner, known = config.part(place), {stack.model_type: stack for stack in stacks}
        held = str(inner.get("model_type"))
        if held not in known:
            raise inner.fault("model_type", f"where {' or '.join(known)} can be read")
        placed[place] = Part(known[held], inner, f"{place}.")
    return placed


def fold_projection(weights: WeightMap, stored: Collection[str]) -> WeightMap:
    """Merges a projection of the encoder's states into the key and value projections, which are linear too."""
    p, b = f"{VISION_ENCODER_DECODER_PROJECTION}.weight", f"{VISION_ENCODER_DECODER_PROJECTION}.bias"
    if p not in stored:
        return weights
    folded = dict(weights)
    for name, one in weights.items():
        if name.endswith("cross_attn.kv.weight"):
            folded[name] = Weight((*one.names, p), partial(_projected_weight, one))
        elif name.endswith("cross_attn.kv.bias"):
            kv = weights[name.removesuffix("bias") + "weight"]
            folded[name] = Weight((*one.names, *kv.names, b), partial(_projected_bias, one, kv))
    return folded


def _projected_weight(kv: Weight, *tensors: Tensor) -> Tensor:
    *own, p = tensors
    return (kv.read(*own).double() @ p.double()).float()


def _projected_bias(bias: Weight, kv: Weight, *tensors: Tensor) -> Tensor:
    *own, b = tensors
    added, weight = bias.read(*own[: len(bias.names)]), kv.read(*own[len(bias.names) :])
    return (weight.double() @ b.double() + added.double()).float()


def export(model: nn.Module) -> Export | None:
    if (
        not isinstance(model, VisionLanguageModel)
        or type(model.encoder) is not ViT
        or type(model.decoder) is not Decoder
    ):
        return None
    encoder, decoder, width = model.encoder, model.decoder, model.decoder.token_embed.embedding_dim
    image_config, images = export_stack(VIT if encoder.class_token is not None else SIGLIP_VISION, encoder)
    text_config, texts = export_stack(GPT2, decoder, "model.decoder")
    if encoder.dim > width:
        raise UserError(
            f"model.encoder.dim: {encoder.dim} is more than the decoder's {width}, which no VisionEncoderDecoderModel "
            "with a GPT-2 computes; export --to safetensors"
        )
    tensors = {f"encoder.{name}": tensor for name, tensor in images.items()}
    tensors |= {f"decoder.{GPT2.prefix}{name}": tensor for name, tensor in texts.items()}
    if encoder.dim < width:
        tensors |= _widened(encoder.dim, width, tensors)
    if encoder.class_token is not None:  # transformers warns if the unused pooler of a ViTModel is missing
        dim = encoder.dim
        tensors |= {"encoder.pooler.dense.weight": torch.zeros(dim, dim), "encoder.pooler.dense.bias": torch.zeros(dim)}
    config = {"model_type": "vision-encoder-decoder", "architectures": ["VisionEncoderDecoderModel"]}
    text_config |= {"add_cross_attention": True, "is_decoder": True}
    both = {"encoder": image_config, "decoder": text_config, "is_encoder_decoder": True}
    return config | both | {"tie_word_embeddings": False}, tensors


def _widened(dim: int, width: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A projection that pads the encoder's states with zeros to the decoder's width, and the layers that read them."""
    layers = {name: tensor for name, tensor in tensors.items() if name.endswith("crossattention.c_attn.weight")}
    filled = {name: torch.cat([one, one.new_zeros(width - dim, 2 * width)]) for name, one in layers.items()}
    projection = {
        f"{VISION_ENCODER_DECODER_PROJECTION}.weight": torch.eye(width, dim),
        f"{VISION_ENCODER_DECODER_PROJECTION}.bias": torch.zeros(width),
    }
    return filled | projection


VISION_ENCODER_DECODER_ARCHITECTURE = Architecture(
    parts=parts,
    models={"VisionEncoderDecoderModel": Model("captioning", captioner)},
    adjust=fold_projection,
    neutral_keys=("is_encoder_decoder",),
    export=export,
)

ARCHITECTURES = {
    "blip": BLIP_ARCHITECTURE,
    "git": GIT_ARCHITECTURE,
    "trocr": TROCR_ARCHITECTURE,
    "vision_encoder_decoder": VISION_ENCODER_DECODER_ARCHITECTURE,
}
