"""A ViT, a DeiT or SigLIP's encoder joined to a GPT-2, each described by its own part of config.json."""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.pretrained.architecture import Architecture, Export, Model, captioner
from vlm.models.pretrained.architectures.deit import DEIT
from vlm.models.pretrained.architectures.gpt2 import GPT2
from vlm.models.pretrained.architectures.siglip_vision_model import SIGLIP_VISION
from vlm.models.pretrained.architectures.vit import VIT
from vlm.models.pretrained.export import export_stack
from vlm.models.pretrained.fields import Fields
from vlm.models.pretrained.stack import Part, Weight, WeightMap
from vlm.models.vit import ViT

STACKS = {"encoder": (VIT, DEIT, SIGLIP_VISION), "decoder": (GPT2,)}
PROJECTION = "enc_to_dec_proj"


def parts(config: Fields) -> dict[str, Part]:
    """The parts.

    Raises:
        UserError: One is of another kind.
    """
    placed = {}
    for place, stacks in STACKS.items():
        inner, known = config.part(place), {stack.model_type: stack for stack in stacks}
        held = str(inner.values.get("model_type"))
        if held not in known:
            raise inner.fault("model_type", f"where {' or '.join(known)} can be read")
        placed[place] = Part(known[held], inner, f"{place}.")
    return placed


def fold_projection(weights: WeightMap, stored: Collection[str]) -> WeightMap:
    """Puts a projection of the encoder's states into the keys and values made of them, which are linear in them too."""
    p, b = f"{PROJECTION}.weight", f"{PROJECTION}.bias"
    if p not in stored:
        return weights
    folded = dict(weights)
    for name, (names, *_) in weights.items():
        if name.endswith("cross_attn.kv.weight"):
            folded[name] = Weight((*names, p), _projected_weight)
        elif name.endswith("cross_attn.kv.bias"):
            folded[name] = Weight((*names, names[0].removesuffix("bias") + "weight", b), _projected_bias)
    return folded


def _projected_weight(kv: Tensor, p: Tensor) -> Tensor:
    return (kv.double().T @ p.double()).float()


def _projected_bias(c: Tensor, kv: Tensor, b: Tensor) -> Tensor:
    return (kv.double().T @ b.double() + c.double()).float()


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
    if encoder.class_token is not None:  # a ViTModel has a layer that nothing here reads; without it there is a warning
        dim = encoder.dim
        tensors |= {"encoder.pooler.dense.weight": torch.zeros(dim, dim), "encoder.pooler.dense.bias": torch.zeros(dim)}
    config = {"model_type": "vision-encoder-decoder", "architectures": ["VisionEncoderDecoderModel"]}
    text_config |= {"add_cross_attention": True, "is_decoder": True}
    both = {"encoder": image_config, "decoder": text_config, "is_encoder_decoder": True}
    return config | both | {"tie_word_embeddings": False}, tensors


def _widened(dim: int, width: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """States of the encoder filled up with zeros to the decoder's width, and the layers that read them."""
    layers = {name: tensor for name, tensor in tensors.items() if name.endswith("crossattention.c_attn.weight")}
    filled = {name: torch.cat([one, one.new_zeros(width - dim, 2 * width)]) for name, one in layers.items()}
    projection = {f"{PROJECTION}.weight": torch.eye(width, dim), f"{PROJECTION}.bias": torch.zeros(width)}
    return filled | projection


ARCHITECTURE = Architecture(
    parts=parts,
    models={"VisionEncoderDecoderModel": Model("captioning", captioner)},
    adjust=fold_projection,
    export=export,
)
