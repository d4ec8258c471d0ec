"""DeiT (Touvron et al. 2021): a ViT with a distillation token beside the class token."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlm.models.classifier import Classifier
from vlm.models.pretrained.architecture import Architecture, Model
from vlm.models.pretrained.architectures import vit
from vlm.models.pretrained.specs import classifier
from vlm.models.pretrained.stack import Names, Part, Sources, Stack
from vlm.models.vit import ViT

HEADS = ("cls_classifier", "distillation_classifier")


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return vit.sizes(config) | {"distillation_token": True}


def sources(encoder: ViT, names: Names) -> Sources:
    token: Sources = {"distillation_token": (("embeddings.distillation_token",), torch.flatten)}
    return vit.sources(encoder, names) | token


def class_head(model: Classifier, names: Names) -> Sources:
    """Its head; of its two heads, whose logits it averages, one that reads both tokens side by side."""
    if model.pool != "distilled":
        return vit.class_head(model, names)
    weights, biases = (tuple(f"{name}.{kind}" for name in HEADS) for kind in ("weight", "bias"))
    return {"head.weight": (weights, _side_by_side), "head.bias": (biases, lambda first, second: (first + second) / 2)}


def _side_by_side(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second], dim=1) / 2


DEIT = Stack(kind=ViT, stem="deit.", sizes=sizes, sources=sources, needed=vit.NEEDED)
ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(DEIT, config)},
    models={
        "DeiTForImageClassification": Model("classification", classifier("class")),
        "DeiTForImageClassificationWithTeacher": Model("classification", classifier("distilled")),
    },
    heads={Classifier: class_head},
)
