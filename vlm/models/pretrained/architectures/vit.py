"""The Vision Transformer (Dosovitskiy et al. 2021), alone or with a classification head."""

from dataclasses import replace

from torch import nn

from vlm.models.classifier import Classifier
from vlm.models.pretrained.architecture import Architecture, Export, Model, classifier
from vlm.models.pretrained.export import export_classifier
from vlm.models.pretrained.fields import flag
from vlm.models.pretrained.stack import IMAGE_SIZES, SIZES, Names, Part, Paths, Stack, layers, table, token
from vlm.models.vit import ViT

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
