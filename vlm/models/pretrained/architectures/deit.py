"""DeiT (Touvron et al. 2021): a ViT with a distillation token after the class token."""

from dataclasses import replace

import torch
from torch import Tensor

from vlm.models.classifier import Classifier
from vlm.models.pretrained.architecture import Architecture, Model, classifier
from vlm.models.pretrained.architectures import vit
from vlm.models.pretrained.stack import Names, Part, Weight, token

DEIT_HEADS = ("cls_classifier", "distillation_classifier")
DEIT = replace(
    vit.VIT,
    model_type="deit",
    prefix="deit.",
    sizes={**vit.VIT.sizes, "distillation_token": True},
    names={**vit.VIT.names, "distillation_token": token("embeddings.distillation_token")},
)


def deit_class_head(model: Classifier) -> Names:
    """Names of the head; two heads with averaged logits become one head that reads both tokens, concatenated."""
    if model.pool != "distilled":
        return vit.vit_class_head(model)
    weights, biases = (tuple(f"{name}.{kind}" for name in DEIT_HEADS) for kind in ("weight", "bias"))
    return {
        "head.weight": Weight(weights, _side_by_side),
        "head.bias": Weight(biases, lambda first, second: (first + second) / 2),
    }


def _side_by_side(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat([first, second], dim=1) / 2


DEIT_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(DEIT, config)},
    models={
        "DeiTForImageClassification": Model("classification", classifier("class")),
        "DeiTForImageClassificationWithTeacher": Model("classification", classifier("distilled")),
    },
    heads={Classifier: deit_class_head},
    unused=(*vit.VIT_HEADS, *(f"{name}.{{kind}}" for name in DEIT_HEADS)),
)
