"""The Vision Transformer (Dosovitskiy et al. 2021), bare or with a head of classes."""

from collections.abc import Mapping
from typing import Any

import torch

from vlm.models.classifier import Classifier
from vlm.models.pretrained.architecture import Architecture, Model
from vlm.models.pretrained.specs import classifier
from vlm.models.pretrained.stack import Names, Part, Sources, Stack, Table, layers, modules, side, stack_sizes
from vlm.models.vit import ViT

LAYERS: Table = {
    "norm1": "layernorm_before",
    "attn.qkv": tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
NEEDED = {"qkv_bias": True, "num_channels": 3}


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    return stack_sizes(config) | {
        "image_size": side(config.get("image_size", 224)),
        "patch_size": side(config.get("patch_size", 16)),
        "class_token": True,
        "stem": "PatchEmbed",
    }


def sources(vit: ViT, names: Names) -> Sources:
    return {
        "class_token": (("embeddings.cls_token",), torch.flatten),
        "positions.weight": (("embeddings.position_embeddings",), lambda table: table[0]),
        **modules({"patch_embed": "embeddings.patch_embeddings.projection", "norm": "layernorm"}),
        **layers(vit.blocks, LAYERS, "encoder.layer"),
    }


def class_head(model: Classifier, names: Names) -> Sources:
    """The head, where ours reads the class token as theirs does."""
    return modules({"head": "classifier"}) if model.pool == "class" else {}


VIT = Stack(kind=ViT, stem="vit.", sizes=sizes, sources=sources, needed=NEEDED)
ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(VIT, config)},
    models={"ViTForImageClassification": Model("classification", classifier("class"))},
    heads={Classifier: class_head},
)
