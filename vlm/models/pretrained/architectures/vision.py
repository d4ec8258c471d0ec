"""Image encoders and classifiers: ViT, DeiT, DINOv2, and any encoder of timm."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vlm.models.classifier import Classifier
from vlm.models.pretrained.architecture import Architecture, Export, Model, classifier
from vlm.models.pretrained.export import export_classifier
from vlm.models.pretrained.fields import REQUIRED, Fields, flag, number, numbers, square, text
from vlm.models.pretrained.stack import (
    IMAGE_SIZES,
    SIZES,
    Names,
    Part,
    Paths,
    Stack,
    Weight,
    WeightMap,
    layers,
    table,
    token,
)
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import ViT
from vlm.nn.image_size import plain

VIT_LAYERS: Paths = {
    "norm1": "layernorm_before",
    "attn.qkv": tuple(f"attention.attention.{part}" for part in ("query", "key", "value")),
    "attn.proj": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}
ENTRANCE: Names = {
    "class_token": token("embeddings.cls_token"),
    "positions.weight": table("embeddings.position_embeddings"),
    "patch_embed": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}
VIT_HEADS = ("classifier.{kind}", "decoder.*.{kind}")  # of classes, and of masked patches
NEEDED = {"num_channels": 3}
QKV_BIAS = replace(flag("qkv_bias", True), write=lambda own: own is not False)  # None in our config means `bias`
VIT = Stack(
    kind=ViT,
    model_type="vit",
    prefix="vit.",
    sizes=SIZES | IMAGE_SIZES | {"qkv_bias": QKV_BIAS},
    names={**ENTRANCE, **layers(VIT_LAYERS, "encoder.layer")},
    unused=("pooler.dense.{kind}", "embeddings.mask_token"),
    needed=NEEDED,
    neutral_keys=("encoder_stride", "pooler_act", "pooler_output_size"),  # of heads that ours has not
)


def vit_class_head(model: Classifier) -> Names:
    """Name of the head, if our model reads the class token like theirs."""
    return {"head": "classifier"} if model.pool == "class" else {}


def export(model: nn.Module) -> Export | None:
    if not isinstance(model, Classifier) or type(model.encoder) is not ViT or model.encoder.class_token is None:
        return None
    config, tensors = export_classifier(model, VIT, pool="class", head=vit_class_head(model))
    return config | {"architectures": ["ViTForImageClassification"]}, tensors


VIT_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(VIT, config)},
    models={"ViTForImageClassification": Model("classification", classifier("class"))},
    heads={Classifier: vit_class_head},
    unused=VIT_HEADS,
    export=export,
)


DEIT_HEADS = ("cls_classifier", "distillation_classifier")
DEIT = replace(
    VIT,
    model_type="deit",
    prefix="deit.",
    sizes={**VIT.sizes, "distillation_token": True},
    names={**VIT.names, "distillation_token": token("embeddings.distillation_token")},
)


def deit_class_head(model: Classifier) -> Names:
    """Names of the head; two heads with averaged logits become one head that reads both tokens, concatenated."""
    if model.pool != "distilled":
        return vit_class_head(model)
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
    unused=(*VIT_HEADS, *(f"{name}.{{kind}}" for name in DEIT_HEADS)),
)


def scaled(module: str, scale: str) -> Weight:
    """The last linear layer of a residual branch, multiplied by the branch's layer scale."""
    parts = (f"{module}.{{kind}}", f"{scale}.lambda1")
    return Weight(tuple(f"encoder.layer.*.{part}" for part in parts), _scaled)


def _scaled(tensor: Tensor, scale: Tensor) -> Tensor:
    return scale[:, None] * tensor if tensor.dim() == 2 else scale * tensor


DINOV2_LAYERS: Paths = {
    "norm1": "norm1",
    "attn.qkv": VIT_LAYERS["attn.qkv"],
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
}
DINOV2 = replace(
    VIT,
    model_type="dinov2",
    prefix="dinov2.",
    sizes={name: one for name, one in VIT.sizes.items() if name != "hidden"}
    | {
        "norm_eps": number("layer_norm_eps", 1e-6),
        "patch_size": square("patch_size", 14),
        "mlp_ratio": number("mlp_ratio", 4, 0.01, 100),
    },
    names={
        **ENTRANCE,
        **layers(DINOV2_LAYERS, "encoder.layer"),
        "blocks.*.attn.proj": scaled("attention.output.dense", "layer_scale1"),
        "blocks.*.mlp.fc2": scaled("mlp.fc2", "layer_scale2"),
    },
    needed=NEEDED | {"use_swiglu_ffn": False},
    # Of backbones for other models, and of masked images.
    neutral_keys=(
        "apply_layernorm",
        "out_features",
        "out_indices",
        "reshape_hidden_states",
        "stage_names",
        "use_mask_token",
    ),
    regrids=True,
)


def dinov2_class_head(model: Classifier) -> Names:
    """Name of the head, if our model reads class token and mean of the patches like theirs."""
    return {"head": "classifier"} if model.pool == "class_mean" else {}


DINOV2_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(DINOV2, config)},
    models={"Dinov2ForImageClassification": Model("classification", classifier("class_mean"))},
    heads={Classifier: dinov2_class_head},
    unused=("classifier.{kind}",),
)


BACKBONE = "backbone."
BUILT = (
    "img_size",
    "in_chans",
    "num_classes",
    "global_pool",
)  # arguments of timm's constructor that are also given by the name and the images


@dataclass(frozen=True, kw_only=True)
class TimmStack(Stack):
    """A backbone that timm builds by name, with timm's own tensor names."""

    def arguments(self, config: Fields) -> dict[str, Any]:
        more = config.part("model_args", {})
        if others := more.values.keys() - {*BUILT}:
            raise more.fault(min(others), "which is not passed on to timm")
        name = config.read(text("architecture", REQUIRED)).partition(".")[0]  # the part after the dot names the weights
        stated = config.part("pretrained_cfg")
        channels, height, width = stated.read(numbers("input_size", [3, 224, 224], 3, 1, 4096))
        if channels != 3:
            raise stated.fault("input_size", "not of images in three channels")
        return {"name": name, "dim": None, "image_size": plain((height, width))}

    def weights(self, module: nn.Module, stored: Collection[str] = ()) -> WeightMap:
        return {
            name: Weight((name.removeprefix(BACKBONE),)) for name in module.state_dict() if name.startswith(BACKBONE)
        }

    def neutral(self, config: Fields) -> list[str]:
        """The layers of the head of classes, which config.json names or else timm's own config of the model."""
        stated = config.part("pretrained_cfg", {}).values.get("classifier")
        if stated is None:
            from timm.models import get_pretrained_cfg

            known = get_pretrained_cfg(config.read(text("architecture", REQUIRED)).partition(".")[0])
            stated = None if known is None else known.classifier
        heads = stated if isinstance(stated, list | tuple) else [stated]
        return [f"{name}.{{kind}}" for name in heads if isinstance(name, str)]


TIMM = TimmStack(kind=TimmEncoder, model_type="timm", sizes={}, names={})
TIMM_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(TIMM, config)},
    # The head is dropped; what the weights are from, and how images are prepared, is read with the preprocessing.
    neutral_keys=("global_pool", "label_descriptions", "label_names", "num_classes", "num_features", "pretrained_cfg"),
)

ARCHITECTURES = {
    "deit": DEIT_ARCHITECTURE,
    "dinov2": DINOV2_ARCHITECTURE,
    "timm": TIMM_ARCHITECTURE,
    "vit": VIT_ARCHITECTURE,
}
