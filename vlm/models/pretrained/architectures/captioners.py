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
from vlm.models.pretrained.architecture import LANGUAGE_MODEL, Architecture, Export, Model, make_spec, specify_captioner
from vlm.models.pretrained.architectures.bert import (
    BERT_EMBEDDINGS,
    BERT_LAYERS,
    BERT_NEUTRAL_KEYS,
    BERT_PREDICTIONS,
    BERT_REQUIREMENTS,
    BERT_SIZES,
    BERT_TIED_EMBEDDING,
    WORD_EMBEDDINGS,
)
from vlm.models.pretrained.architectures.dual_encoders import CLIP_VISION, SIGLIP_VISION
from vlm.models.pretrained.architectures.language_models import GPT2
from vlm.models.pretrained.architectures.text_to_text import (
    BART_CROSS_LAYERS,
    BART_LAYERS,
    make_bart_sizes,
    read_embed_scale,
)
from vlm.models.pretrained.architectures.vision import DEIT, VIT
from vlm.models.pretrained.export import export_stack
from vlm.models.pretrained.fields import Fields, flag, integer, number, square
from vlm.models.pretrained.stack import (
    Part,
    Paths,
    Stack,
    StackArguments,
    Weight,
    WeightMap,
    batched_weight,
    expand_layers,
    select_stack,
    token_weight,
)
from vlm.models.vit import ViT
from vlm.nn.position import LearnedPositions, SplitSinusoids
from vlm.untrusted.sizes import JsonValue

POSITION_OFFSET = 2  # number of learned positions that precede the first token's


def read_trocr_arguments(sizes: StackArguments, config: Fields) -> StackArguments:
    """Arguments for sinusoids if positions are not learned, and for an untied head if there is one."""
    dim = sizes["dim"]
    arguments: StackArguments = {"embed_scale": read_embed_scale(sizes, config)}
    if not config.read(flag("use_learned_position_embeddings", True)):
        first = config.read(integer("pad_token_id", 1, low=0)) + 1
        # As in tensor2tensor, the last wave is the longest: 10,000 ** (-2 i / (D - 2)).
        arguments["positions"] = make_spec("SplitSinusoids", dim=dim, base=10_000.0 ** (dim / (dim - 2)), first=first)
    if not config.read(flag("tie_word_embeddings", True)):
        arguments["vocabulary_head"] = make_spec("VocabularyHead", dim=dim, vocab_size=sizes["vocab_size"], tied=False)
    return arguments


TROCR = Stack(
    kind=Decoder,
    model_type="trocr",
    prefix="model.decoder.",
    sizes={
        **make_bart_sizes("decoder", vocab_size=50265, max_len=512),
        "embed_norm": flag("layernorm_embedding", True),
    },
    more=read_trocr_arguments,
    names={
        "token_embed.weight": "embed_tokens.weight",
        "positions.weight": Weight(
            ("embed_positions.weight",),
            lambda rows: rows[POSITION_OFFSET:],
            lambda rows: F.pad(rows, (0, 0, POSITION_OFFSET, 0)),
        ),
        "embed_norm": "layernorm_embedding",
        **expand_layers(BART_LAYERS, "layers"),
    },
    unused=("embed_positions._float_tensor",),  # shows older versions the type of the model
    neutral_keys=("add_cross_attention", "cross_attention_hidden_size", "is_decoder"),  # shown by the tensors
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "decoder_attention_heads",
        "num_hidden_layers": "decoder_layers",
    },
    extra=expand_layers(BART_CROSS_LAYERS, "layers"),
    head={
        "token_embed.weight": "model.decoder.embed_tokens.weight|output_projection.weight",
        "vocabulary_head.own.weight": "output_projection.weight",
    },
)
TROCR_ARCHITECTURE = Architecture(
    parts=lambda config: {"decoder": Part(TROCR, config)},
    models={"TrOCRForCausalLM": LANGUAGE_MODEL},
)


BLIP_VISION_LAYERS: Paths = {
    "norm1": "layer_norm1",
    "attn.qkv": "self_attn.qkv",
    "attn.proj": "self_attn.projection",
    "norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
BLIP_TEXT_LAYERS: Paths = {
    **BERT_LAYERS,
    "norm_cross": "crossattention.output.LayerNorm",
    "cross_attn.q": "crossattention.self.query",
    "cross_attn.kv": ("crossattention.self.key", "crossattention.self.value"),
    "cross_attn.proj": "crossattention.output.dense",
}
DEFAULT_IDS = {"bos_token_id": 30522, "sep_token_id": 102, "pad_token_id": 0}  # [DEC], [SEP] and [PAD]
BLIP_VISION = Stack(
    kind=ViT,
    model_type="blip_vision_model",
    sizes={**VIT.sizes, "image_size": square("image_size", 384), "norm_eps": number("layer_norm_eps", 1e-5)},
    names={
        "class_token": token_weight("embeddings.class_embedding"),
        "positions.weight": batched_weight("embeddings.position_embedding"),
        "patch_embed": "embeddings.patch_embedding",
        "norm": "post_layernorm",
        **expand_layers(BLIP_VISION_LAYERS, "encoder.layers"),
    },
    needed={"num_channels": 3},
    neutral_keys=("projection_dim",),
)


BLIP_TEXT = Stack(
    kind=Decoder,
    model_type="blip_text_model",
    prefix="bert.",
    sizes=BERT_SIZES
    | {
        "num_heads": integer("num_attention_heads", 8),
        "vocab_size": integer("vocab_size", 30524),
        "context_dim": integer("encoder_hidden_size", 768),
    },
    more=lambda sizes, config: {
        "vocabulary_head": make_spec(
            "VocabularyHead",
            bias=True,
            transform=sizes["activation"],
            **{name: sizes[name] for name in ("dim", "vocab_size", "norm_eps")},
        )
    },
    names={**BERT_EMBEDDINGS, **expand_layers(BLIP_TEXT_LAYERS, "encoder.layer")},
    head={**BERT_PREDICTIONS, **BERT_TIED_EMBEDDING},
    unused=("embeddings.position_ids",),
    needed=BERT_REQUIREMENTS | {"is_decoder": True, "tie_word_embeddings": True},
    neutral_keys=("add_cross_attention", "encoder_hidden_size", "projection_dim"),  # read as context_dim
)


def read_blip_generation(config: Fields) -> Fields:
    """Decoding options: those of the decoder's part of config.json, with texts that end with [SEP]."""
    config.require({"tie_word_embeddings": True}, "our Decoder")
    text = config.part("text_config")
    ids = {name: default if name not in text else text.values[name] for name, default in DEFAULT_IDS.items()}
    return text | ids | {"decoder_start_token_id": ids["bos_token_id"], "eos_token_id": ids["sep_token_id"]}


BLIP_ARCHITECTURE = Architecture(
    parts=lambda config: {
        "encoder": Part(BLIP_VISION, config.part("vision_config"), "vision_model."),
        "decoder": Part(BLIP_TEXT, config.part("text_config"), "text_decoder."),
    },
    models={"BlipForConditionalGeneration": Model("captioning", specify_captioner)},
    generation=read_blip_generation,
    neutral_keys=("image_text_hidden_size", "projection_dim"),
    added_tokens=("[DEC]", "[ENC]"),
)


GIT_PROJECTION = "visual_projection.visual_projection"
GIT_VISION = replace(CLIP_VISION, sizes={**CLIP_VISION.sizes, "patch_size": square("patch_size", 16)})


def get_vision_config(config: Fields) -> Fields:
    return config.part("vision_config") if "vision_config" in config else config.part("", {})


def read_git_arguments(sizes: StackArguments, config: Fields) -> StackArguments:
    dim, vision = sizes["dim"], GIT_VISION.read_arguments(get_vision_config(config))
    tied = config.read(flag("tie_word_embeddings", False))
    norm = {"norm": True, "norm_eps": vision["norm_eps"]}
    return {
        "prefix": make_spec("Prefix", dim=dim, context_dim=vision["dim"], project=True, **norm),
        "vocabulary_head": make_spec("VocabularyHead", dim=dim, vocab_size=sizes["vocab_size"], tied=tied, bias=True),
    }


GIT_TEXT = Stack(
    kind=Decoder,
    model_type="git",
    prefix="git.",
    sizes=BERT_SIZES
    | {
        "depth": integer("num_hidden_layers", 6, high=1000),
        "max_len": integer("max_position_embeddings", 1024),
    },
    more=read_git_arguments,
    names={
        **BERT_EMBEDDINGS,
        **expand_layers(BERT_LAYERS, "encoder.layer"),
        "prefix.project": f"{GIT_PROJECTION}.0",
        "prefix.norm": f"{GIT_PROJECTION}.1",
    },
    head={
        "token_embed.weight": f"git.{WORD_EMBEDDINGS}|{WORD_EMBEDDINGS}|output.weight",
        "vocabulary_head.own": "output",
        "vocabulary_head.bias": "output.bias",
    },
    unused=("embeddings.position_ids",),
    neutral_keys=BERT_NEUTRAL_KEYS,
    needed=BERT_REQUIREMENTS | {"num_image_with_embedding": None},  # used for video
)
GIT_ARCHITECTURE = Architecture(
    parts=lambda config: {
        "encoder": Part(GIT_VISION, get_vision_config(config), "git.image_encoder."),
        "decoder": Part(GIT_TEXT, config),
    },
    models={"GitForCausalLM": Model("captioning", specify_captioner)},
)


STACKS = {"encoder": (VIT, DEIT, SIGLIP_VISION), "decoder": (GPT2, TROCR)}
VISION_ENCODER_DECODER_PROJECTION = "enc_to_dec_proj"


def fold_projection(weights: WeightMap, stored: Collection[str]) -> WeightMap:
    """Merges a projection of the encoder's states into the key and value projections, which are linear too."""
    p, b = f"{VISION_ENCODER_DECODER_PROJECTION}.weight", f"{VISION_ENCODER_DECODER_PROJECTION}.bias"
    if p not in stored:
        return weights
    folded = dict(weights)
    for name, weight in weights.items():
        if name.endswith("cross_attn.kv.weight"):
            folded[name] = Weight((*weight.names, p), partial(_fold, weight, None))
        elif name.endswith("cross_attn.kv.bias"):
            kv = weights[name.removesuffix("bias") + "weight"]
            folded[name] = Weight((*kv.names, b, *weight.names), partial(_fold, kv, weight))
    return folded


def _fold(kv: Weight, bias: Weight | None, *tensors: Tensor) -> Tensor:
    """Multiplies a weight by a weight or bias of the projection, the tensor after it, and adds its own bias."""
    count = len(kv.names)
    folded = kv.read(*tensors[:count]).double() @ tensors[count].double()
    return (folded if bias is None else folded + bias.read(*tensors[count + 1 :]).double()).float()


def export_trocr(encoder: ViT, decoder: Decoder) -> Export:
    """Exports a ViT or DeiT with a decoder of TrOCR, as a VisionEncoderDecoderModel."""
    has_token = encoder.class_token is not None
    stack = DEIT if encoder.distillation_token is not None else VIT if has_token else SIGLIP_VISION
    image_config, images = export_stack(stack, encoder)
    learned = isinstance(decoder.positions, LearnedPositions)
    head = decoder.vocabulary_head
    tied = head is None or head.own is None
    more: dict[str, JsonValue] = {
        "scale_embedding": decoder.embed_scale != 1,
        "use_learned_position_embeddings": learned,
        "layernorm_embedding": not isinstance(decoder.embed_norm, nn.Identity),
        "tie_word_embeddings": tied,
        "cross_attention_hidden_size": encoder.dim,
    }
    if isinstance(decoder.positions, SplitSinusoids):
        more["pad_token_id"] = decoder.positions.first - 1
    text_config, texts = export_stack(
        TROCR,
        decoder,
        "model.decoder",
        head=lambda head: head.parts(torch.empty(0))[1:] == (None, None),
        more=more,
    )
    tensors = {f"encoder.{name}": tensor for name, tensor in images.items()}
    tensors |= {f"decoder.{TROCR.prefix}{name}": tensor for name, tensor in texts.items()}
    tensors["decoder.output_projection.weight"] = decoder.head_parts.weight
    if has_token:
        dim = encoder.dim
        tensors |= {"encoder.pooler.dense.weight": torch.zeros(dim, dim), "encoder.pooler.dense.bias": torch.zeros(dim)}
    text_config |= {"add_cross_attention": True, "is_decoder": True}
    config: dict[str, JsonValue] = {
        "model_type": "vision-encoder-decoder",
        "architectures": ["VisionEncoderDecoderModel"],
        "encoder": image_config,
        "decoder": text_config,
        "is_encoder_decoder": True,
        "tie_word_embeddings": False,
    }
    return config, tensors


def export_vision_encoder_decoder(model: nn.Module) -> Export | None:
    if (
        not isinstance(model, VisionLanguageModel)
        or type(model.encoder) is not ViT
        or type(model.decoder) is not Decoder
    ):
        return None
    encoder, decoder, width = model.encoder, model.decoder, model.decoder.token_embed.embedding_dim
    block: Any = decoder.blocks[0]
    if not block.config.pre_norm:  # GPT-2 has norms before its branches
        return export_trocr(encoder, decoder)
    image_config, images = export_stack(VIT if encoder.class_token is not None else SIGLIP_VISION, encoder)
    text_config, texts = export_stack(GPT2, decoder, "model.decoder")
    if encoder.dim > width:
        raise UserError(
            f"model.encoder.dim: {encoder.dim} exceeds the decoder's {width}, which VisionEncoderDecoderModel does not "
            "support with GPT-2; use --to safetensors"
        )
    tensors = {f"encoder.{name}": tensor for name, tensor in images.items()}
    tensors |= {f"decoder.{GPT2.prefix}{name}": tensor for name, tensor in texts.items()}
    if encoder.dim < width:
        tensors |= _pad_to_width(encoder.dim, width, tensors)
    if encoder.class_token is not None:  # transformers warns if the unused pooler of a ViTModel is missing
        dim = encoder.dim
        tensors |= {"encoder.pooler.dense.weight": torch.zeros(dim, dim), "encoder.pooler.dense.bias": torch.zeros(dim)}
    config: dict[str, JsonValue] = {
        "model_type": "vision-encoder-decoder",
        "architectures": ["VisionEncoderDecoderModel"],
    }
    text_config |= {"add_cross_attention": True, "is_decoder": True}
    config |= {"encoder": image_config, "decoder": text_config, "is_encoder_decoder": True}
    return config | {"tie_word_embeddings": False}, tensors


def _pad_to_width(dim: int, width: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a projection that zero-pads the encoder's states to the decoder's width, and the layers after it."""
    layers = {name: tensor for name, tensor in tensors.items() if name.endswith("crossattention.c_attn.weight")}
    padded = {name: torch.cat([rows, rows.new_zeros(width - dim, 2 * width)]) for name, rows in layers.items()}
    projection = {
        f"{VISION_ENCODER_DECODER_PROJECTION}.weight": torch.eye(width, dim),
        f"{VISION_ENCODER_DECODER_PROJECTION}.bias": torch.zeros(width),
    }
    return padded | projection


VISION_ENCODER_DECODER_ARCHITECTURE = Architecture(
    parts=lambda config: {
        place: Part(select_stack(inner := config.part(place), *stacks), inner, f"{place}.")
        for place, stacks in STACKS.items()
    },
    models={"VisionEncoderDecoderModel": Model("captioning", specify_captioner)},
    adjust=fold_projection,
    neutral_keys=("is_encoder_decoder",),
    export=export_vision_encoder_decoder,
)

ARCHITECTURES = {
    "blip": BLIP_ARCHITECTURE,
    "git": GIT_ARCHITECTURE,
    "trocr": TROCR_ARCHITECTURE,
    "vision_encoder_decoder": VISION_ENCODER_DECODER_ARCHITECTURE,
}
