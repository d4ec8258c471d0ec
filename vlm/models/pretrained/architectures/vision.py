"""Image encoders and classifiers: ViT, DeiT, DINOv2, and any encoder of timm."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from vlm.models.classifier import Classifier
from vlm.models.pretrained.architecture import Architecture, Export, Model, name_class_head, specify_classifier
from vlm.models.pretrained.export import export_classifier
from vlm.models.pretrained.fields import REQUIRED, Fields, flag, number, numbers, square, text
from vlm.models.pretrained.stack import (
    IMAGE_SIZES,
    SIZES,
    Names,
    Part,
    Paths,
    Stack,
    StackArguments,
    Weight,
    WeightMap,
    batched_weight,
    expand_layers,
    token_weight,
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
VIT_EMBEDDINGS: Names = {
    "class_token": token_weight("embeddings.cls_token"),
    "positions.weight": batched_weight("embeddings.position_embeddings"),
    "patch_embed": "embeddings.patch_embeddings.projection",
    "norm": "layernorm",
}
VIT_HEADS = ("classifier.{kind}", "decoder.*.{kind}")  # of classes, and of masked patches
VIT_REQUIREMENTS = {"num_channels": 3}
QKV_BIAS = replace(flag("qkv_bias", True), write=lambda bias: bias is not False)  # None in our config means `bias`
VIT = Stack(
    kind=ViT,
    model_type="vit",
    prefix="vit.",
    sizes=SIZES | IMAGE_SIZES | {"qkv_bias": QKV_BIAS},
    names={**VIT_EMBEDDINGS, **expand_layers(VIT_LAYERS, "encoder.layer")},
    unused=("pooler.dense.{kind}", "embeddings.mask_token"),
    needed=VIT_REQUIREMENTS,
    neutral_keys=("encoder_stride", "pooler_act", "pooler_output_size"),  # of heads that our ViT lacks
)


def export_vit(model: nn.Module) -> Export | None:
    if not isinstance(model, Classifier) or type(model.encoder) is not ViT or model.encoder.class_token is None:
        return None
    config, tensors = export_classifier(model, VIT, pool="class", head=name_class_head(model, pool="class"))
    return config | {"architectures": ["ViTForImageClassification"]}, tensors


VIT_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(VIT, config)},
    models={"ViTForImageClassification": Model("classification", partial(specify_classifier, pool="class"))},
    heads={Classifier: partial(name_class_head, pool="class")},
    unused=VIT_HEADS,
    export=export_vit,
)


DEIT_HEADS = ("cls_classifier", "distillation_classifier")
DEIT = replace(
    VIT,
    model_type="deit",
    prefix="deit.",
    sizes={**VIT.sizes, "distillation_token": True},
    names={**VIT.names, "distillation_token": token_weight("embeddings.distillation_token")},
)


def name_deit_head(model: Classifier) -> Names:
    """Returns the names of the head; two heads with averaged logits become one head on both tokens, concatenated."""
    if model.pool != "distilled":
        return name_class_head(model, pool="class")
    weights, biases = (tuple(f"{name}.{kind}" for name in DEIT_HEADS) for kind in ("weight", "bias"))
    return {
        "head.weight": Weight(weights, lambda first, second: torch.cat([first, second], dim=1) / 2),
        "head.bias": Weight(biases, lambda first, second: (first + second) / 2),
    }


DEIT_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(DEIT, config)},
    models={
        "DeiTForImageClassification": Model("classification", partial(specify_classifier, pool="class")),
        "DeiTForImageClassificationWithTeacher": Model("classification", partial(specify_classifier, pool="distilled")),
    },
    heads={Classifier: name_deit_head},
    unused=(*VIT_HEADS, *(f"{name}.{{kind}}" for name in DEIT_HEADS)),
)


def fold_layer_scale(module: str, scale: str) -> Weight:
    """Maps the last linear layer of a residual branch to theirs, multiplied by the branch's layer scale."""
    parts = (f"{module}.{{kind}}", f"{scale}.lambda1")
    return Weight(
        tuple(f"encoder.layer.*.{part}" for part in parts),
        lambda tensor, scale: scale[:, None] * tensor if tensor.dim() == 2 else scale * tensor,
    )


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
    sizes={name: size for name, size in VIT.sizes.items() if name != "hidden"}
    | {
        "norm_eps": number("layer_norm_eps", 1e-6),
        "patch_size": square("patch_size", 14),
        "mlp_ratio": number("mlp_ratio", 4, 0.01, 100),
    },
    names={
        **VIT_EMBEDDINGS,
        **expand_layers(DINOV2_LAYERS, "encoder.layer"),
        "blocks.*.attn.proj": fold_layer_scale("attention.output.dense", "layer_scale1"),
        "blocks.*.mlp.fc2": fold_layer_scale("mlp.fc2", "layer_scale2"),
    },
    needed=VIT_REQUIREMENTS | {"use_swiglu_ffn": False},
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


DINOV2_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(DINOV2, config)},
    models={"Dinov2ForImageClassification": Model("classification", partial(specify_classifier, pool="class_mean"))},
    heads={Classifier: partial(name_class_head, pool="class_mean")},
    unused=("classifier.{kind}",),
)


BACKBONE = "backbone."
# Arguments of timm's constructor that also follow from the name and the images.
HANDLED_ARGUMENTS = ("img_size", "in_chans", "num_classes", "global_pool")


@dataclass(frozen=True, kw_only=True)
class TimmStack(Stack):
    """A backbone that timm builds by name, with timm's own tensor names."""

    def read_arguments(self, config: Fields) -> StackArguments:
        more = config.part("model_args", {})
        if unsupported := more.values.keys() - {*HANDLED_ARGUMENTS}:
            raise more.error(min(unsupported), "which vlm does not pass to timm")
        name = config.read(text("architecture", REQUIRED)).partition(".")[0]  # the part after the dot names the weights
        stated = config.part("pretrained_cfg")
        channels, height, width = stated.read(numbers("input_size", [3, 224, 224], 3, 1, 4096))
        if channels != 3:
            raise stated.error("input_size", "where vlm supports 3 channels only")
        return {"name": name, "dim": None, "image_size": plain((height, width))}  # type: ignore[typeddict-item]

    def map_weights(self, module: nn.Module, stored: Collection[str] = ()) -> WeightMap:
        return {
            name: Weight((name.removeprefix(BACKBONE),)) for name in module.state_dict() if name.startswith(BACKBONE)
        }

    def list_unused(self, config: Fields) -> list[str]:
        """Returns the classifier's tensors, named in config.json or else in timm's default config of the model."""
        stated = config.part("pretrained_cfg", {}).values.get("classifier")
        if stated is None:
            from timm.models import get_pretrained_cfg

            default = get_pretrained_cfg(config.read(text("architecture", REQUIRED)).partition(".")[0])
            stated = None if default is None else default.classifier
        heads = stated if isinstance(stated, list | tuple) else [stated]
        return [f"{name}.{{kind}}" for name in heads if isinstance(name, str)]


TIMM = TimmStack(kind=TimmEncoder, model_type="timm", sizes={}, names={})
TIMM_ARCHITECTURE = Architecture(
    parts=lambda config: {"encoder": Part(TIMM, config)},
    # The head is dropped. `pretrained_cfg` is read with the preprocessing.
    neutral_keys=("global_pool", "label_descriptions", "label_names", "num_classes", "num_features", "pretrained_cfg"),
)

ARCHITECTURES = {
    "deit": DEIT_ARCHITECTURE,
    "dinov2": DINOV2_ARCHITECTURE,
    "timm": TIMM_ARCHITECTURE,
    "vit": VIT_ARCHITECTURE,
}
