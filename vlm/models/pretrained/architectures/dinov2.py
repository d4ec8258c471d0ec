"""DINOv2 (Oquab et al. 2023): a ViT with layer scale, whose positions are interpolated to the images' own grid."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vlm.models.classifier import Classifier
from vlm.models.pretrained.architecture import Architecture, Model
from vlm.models.pretrained.architectures import vit
from vlm.models.pretrained.specs import classifier
from vlm.models.pretrained.stack import Names, Part, Sources, Stack, Table, layers, modules
from vlm.models.vit import ViT

LAYERS: Table = {
    "norm1": "norm1",
    "attn.qkv": tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
}
# The last layer of each residual branch, and the scale of that branch.
SCALED = {"attn.proj": ("attention.output.dense", "layer_scale1"), "mlp.fc2": ("mlp.fc2", "layer_scale2")}


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {"layer_norm_eps": 1e-6, "patch_size": 14}
    return vit.sizes({**defaults, **config}) | {"mlp_ratio": config.get("mlp_ratio", 4)}


def sources(encoder: ViT, names: Names) -> Sources:
    tensors: Sources = {
        "class_token": (("embeddings.cls_token",), torch.flatten),
        "positions.weight": (("embeddings.position_embeddings",), lambda table: table[0]),
        **modules({"patch_embed": "embeddings.patch_embeddings.projection", "norm": "layernorm"}),
        **layers(encoder.blocks, LAYERS, "encoder.layer"),
    }
    for number in range(len(encoder.blocks)):
        for name, (other, scale) in SCALED.items():
            for kind in ("weight", "bias"):
                parts = tuple(f"encoder.layer.{number}.{part}" for part in (f"{other}.{kind}", f"{scale}.lambda1"))
                tensors[f"blocks.{number}.{name}.{kind}"] = (parts, _scaled)
    return tensors


def _scaled(tensor: Tensor, scale: Tensor) -> Tensor:
    """A linear layer with the scale of its outputs in it, which is all that there is to layer scale."""
    return scale[:, None] * tensor if tensor.dim() == 2 else scale * tensor


def class_head(model: Classifier, names: Names) -> Sources:
    """The head, where ours reads the class token beside the mean of the patches as theirs does."""
    return modules({"head": "classifier"}) if model.pool == "class_mean" else {}


DINOV2 = Stack(
    kind=ViT,
    stem="dinov2.",
    sizes=sizes,
    sources=sources,
    needed=vit.NEEDED | {"use_swiglu_ffn": False},
    regrids=True,
)
ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(DINOV2, config)},
    models={"Dinov2ForImageClassification": Model("classification", classifier("class_mean"))},
    heads={Classifier: class_head},
)
