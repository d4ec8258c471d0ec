"""Exports the parts of models that read images inside their prompts, whose classes join an encoder and a decoder."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.context import Prefix
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import ProjectedEncoder, VisionLanguageModel
from vlm.models.pretrained.architecture import Export
from vlm.models.pretrained.architectures.dual_encoders import CLIP_VISION, POSITIONS, SIGLIP_VISION, fold_patch_bias
from vlm.models.pretrained.architectures.language_models import export_decoder
from vlm.models.pretrained.architectures.vision import VIT
from vlm.models.pretrained.export import export_stack
from vlm.models.pretrained.fields import flag
from vlm.models.pretrained.stack import Stack
from vlm.models.pretrained.timm_export import convert_timm_vit
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import ViT
from vlm.untrusted.sizes import JsonValue

TIED_LAST = flag("tie_last_hidden_states", False)  # whether the last states of an encoder are those after its norm
REFUSED = "; transformers has no class for that: use --to safetensors"


def get_joined_parts(model: nn.Module, projector: type[nn.Module], *, causal: bool) -> tuple[Any, Any, Any] | None:
    """Returns encoder, projector and decoder of a model that reads images inside its text; None for any other model.

    A plain ViT of timm becomes a ViT of ours.

    Args:
        projector: Class of the projector.
        causal: Whether attention in the prompt is causal.
    """
    if (
        not isinstance(model, VisionLanguageModel)
        or not isinstance(model.encoder, ProjectedEncoder)
        or type(model.encoder.projector) is not projector
        or type(model.decoder) is not Decoder
        or type(model.decoder.prefix) is not Prefix
    ):
        return None
    prefix = model.decoder.prefix
    is_plain = isinstance(prefix.project, nn.Identity) and isinstance(prefix.norm, nn.Identity)
    if not is_plain or not prefix.counted or prefix.causal != causal:
        return None
    encoder, backbone = model.encoder, model.encoder.backbone
    if isinstance(backbone, TimmEncoder) and isinstance(backbone.proj, nn.Identity):
        backbone = convert_timm_vit(backbone, "model.encoder.backbone")
        encoder = ProjectedEncoder(backbone=backbone, projector=encoder.projector, dim=encoder.dim, drop=encoder.drop)
    if type(backbone) is not ViT:
        raise UserError(f"model.encoder.backbone: is a {type(backbone).__name__}, not a ViT{REFUSED}")
    return encoder, encoder.projector, model.decoder


def export_text(decoder: nn.Module, *stacks: Stack) -> Export:
    """Converts a decoder to the first of these stacks that computes the same.

    Raises:
        UserError: None does.
    """
    for stack in stacks:
        if (exported := export_decoder(decoder, stack, key="model.decoder", has_prefix=True)) is not None:
            return exported
    raise UserError(f"model.decoder: is not a {' or '.join(stack.model_type for stack in stacks)}{REFUSED}")


def export_joined(
    kind: tuple[str, str], vision: Export, text: Export, projector: Mapping[str, Tensor], prefixes: tuple[str, str]
) -> Export:
    """Joins the parts of a model.

    Args:
        kind: Model type and name of the Hugging Face class.
        prefixes: Prefixes of the tensors of encoder and decoder; that of the head is in the latter, without "model.".
    """
    (vision_config, images), (text_config, texts) = vision, text
    images = {f"{prefixes[0]}{name}": tensor for name, tensor in images.items()}
    texts = {f"{prefixes[1]}{name}": tensor for name, tensor in texts.items()}
    config: dict[str, JsonValue] = {"model_type": kind[0], "architectures": [kind[1]]}
    config |= {
        "vision_config": vision_config,
        "text_config": text_config,
        "tie_word_embeddings": text_config["tie_word_embeddings"],
    }
    return config, {**images, **projector, **texts}


def name_projector_tensors(projector: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns the tensors of a projector by their names there."""
    layers = {name: name.rpartition(".") for name in projector.state_dict()}
    return {
        f"{names[layer]}.{kind}": projector.state_dict()[name]
        for name, (layer, _, kind) in layers.items()
        if layer in names
    }


def export_llava_vision(backbone: Any) -> Export:
    """Converts an encoder to one whose last hidden states are its states.

    Raises:
        UserError: LLaVA has no such encoder; the message names the key.
    """
    key = "model.encoder.backbone"
    is_clip, normed = not isinstance(backbone.embed_norm, nn.Identity), not isinstance(backbone.norm, nn.Identity)
    stack = CLIP_VISION if is_clip else SIGLIP_VISION if backbone.class_token is None else VIT
    if is_clip and normed:
        raise UserError(
            f"{key}.final_norm: is true, but LLaVA reads CLIP's states before its final norm; train with "
            f"++{key}.final_norm=false, or use --to safetensors"
        )
    names = {ours: theirs for ours, theirs in stack.names.items() if normed or ours != "norm"}
    own = replace(stack, sizes={**stack.sizes, "final_norm": normed}, names=names)
    config, tensors = export_stack(own, backbone, key)
    prefix, dim = "" if stack is VIT else stack.prefix, backbone.dim
    tensors = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    if is_clip:
        tensors |= fold_patch_bias(backbone, tensors[f"{prefix}{POSITIONS}"])
    if normed:
        config[TIED_LAST.name] = True
    else:  # the norm has no effect there, but transformers warns if it is missing
        norm = f"{prefix}{stack.names['norm']}"
        tensors |= {f"{norm}.weight": torch.ones(dim), f"{norm}.bias": torch.zeros(dim)}
    if stack is VIT:  # the same of the pooler
        tensors |= {"pooler.dense.weight": torch.zeros(dim, dim), "pooler.dense.bias": torch.zeros(dim)}
    return config, tensors
