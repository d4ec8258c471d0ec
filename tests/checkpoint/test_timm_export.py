"""ViTs of timm as ViTs of ours: the same features, or a reason."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hugging import wide

from vlm.errors import UserError
from vlm.models.pretrained.timm_export import convert_timm_vit
from vlm.models.timm_encoder import TimmEncoder

# With a class token; without; with a norm after pooling only; with layer scale; with that and a token without position.
CASES = ["test_vit", "vit_base_patch16_siglip_224", "vit_medium_patch16_gap_240", "vit_small_patch14_dinov2"]
CASES += ["deit3_small_patch16_224"]
REFUSED = {
    "test_vit2": "has reg_token",
    "vit_xsmall_patch16_clip_224": "has norm_pre.bias",
    "test_vit_relpos": "has the class VisionTransformerRelPos",
    "test_resnet": "has the class ResNet",
    "vit_base_patch16_rpn_224": "has other computations than ViT",
}


def mark_large(names: Iterable[str]) -> list[Any]:
    return [name if name.startswith("test_") else pytest.param(name, marks=pytest.mark.slow) for name in names]


def encoder(name: str) -> TimmEncoder:
    torch.manual_seed(0)
    return wide(TimmEncoder(name=name, dim=None, image_size=28 if "patch14" in name else 32), std=0.1)


@torch.no_grad()
@pytest.mark.parametrize("name", mark_large(CASES))
def test_features_are_timms(name: str) -> None:
    theirs = encoder(name)
    vit = convert_timm_vit(theirs, "model.encoder.backbone")
    images = torch.randn(2, 3, *theirs.backbone.patch_embed.img_size)
    torch.testing.assert_close(vit(images).states, theirs.features(images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", mark_large(REFUSED))
def test_other_backbones_are_refused_by_what_they_have(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} of timm {REFUSED[name]}.* --to safetensors or --to onnx"):
        convert_timm_vit(encoder(name), "model.encoder.backbone")
