"""VisionEncoderDecoderModel: a ViT, a DeiT or SigLIP's encoder, with GPT-2 or TrOCR's decoder."""

from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.pretrained.architecture import Architecture, Export, Model, captioner
from vlm.models.pretrained.architectures.deit import DEIT
from vlm.models.pretrained.architectures.gpt2 import GPT2
from vlm.models.pretrained.architectures.siglip_vision_model import SIGLIP_VISION
from vlm.models.pretrained.architectures.trocr import TROCR
from vlm.models.pretrained.architectures.vit import VIT
from vlm.models.pretrained.export import export_stack
from vlm.models.pretrained.fields import Fields
from vlm.models.pretrained.stack import Part, Weight, WeightMap
from vlm.models.vit import ViT

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
