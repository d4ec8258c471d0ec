"""DINOv2 (Oquab et al. 2023): a ViT with layer scale, whose positions are interpolated to the grid of the images."""

from dataclasses import replace

from torch import Tensor

from vlm.models.classifier import Classifier
from vlm.models.pretrained.architecture import Architecture, Model, classifier
from vlm.models.pretrained.architectures import vit
from vlm.models.pretrained.fields import number, square
from vlm.models.pretrained.stack import Names, Part, Paths, Weight, layers


def scaled(module: str, scale: str) -> Weight:
    """The last linear layer of a residual branch, multiplied by the branch's layer scale."""
    parts = (f"{module}.{{kind}}", f"{scale}.lambda1")
    return Weight(tuple(f"encoder.layer.*.{part}" for part in parts), _scaled)


def _scaled(tensor: Tensor, scale: Tensor) -> Tensor:
    return scale[:, None] * tensor if tensor.dim() == 2 else scale * tensor


DINOV2_LAYERS: Paths = {
    "norm1": "norm1",
    "attn.qkv": vit.VIT_LAYERS["attn.qkv"],
    "norm2": "norm2",
    "mlp.fc1": "mlp.fc1",
}
DINOV2 = replace(
    vit.VIT,
    model_type="dinov2",
    prefix="dinov2.",
    sizes={name: one for name, one in vit.VIT.sizes.items() if name != "hidden"}
    | {
        "norm_eps": number("layer_norm_eps", 1e-6),
        "patch_size": square("patch_size", 14),
        "mlp_ratio": number("mlp_ratio", 4, 0.01, 100),
    },
    names={
        **vit.ENTRANCE,
        **layers(DINOV2_LAYERS, "encoder.layer"),
        "blocks.*.attn.proj": scaled("attention.output.dense", "layer_scale1"),
        "blocks.*.mlp.fc2": scaled("mlp.fc2", "layer_scale2"),
    },
    needed=vit.NEEDED | {"use_swiglu_ffn": False},
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
