"""The ViT against timm's."""

import pytest
import timm
import torch
from torch import nn

from vlm.models.vit import ViT

SIZES = {"image_size": 24, "patch_size": 8, "dim": 12, "depth": 2, "num_heads": 3}


def test_equals_timm(scramble):
    theirs = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=24,
        patch_size=8,
        embed_dim=12,
        depth=2,
        num_heads=3,
        num_classes=0,
        class_token=False,
        global_pool="avg",
        fc_norm=False,
    )
    for layer in scramble(theirs).modules():
        if isinstance(layer, nn.LayerNorm):
            layer.eps = 1e-5  # timm's is 1e-6
    state = {name.replace("patch_embed.proj", "patch_embed"): tensor for name, tensor in theirs.state_dict().items()}
    ours = ViT(**SIZES).eval()
    ours.load_state_dict(state | {"positions.weight": state.pop("pos_embed")[0]})
    images = torch.randn(2, 3, 24, 24)
    context = ours(images)
    assert context.states.shape == (2, 9, 12)
    assert context.mask is None
    torch.testing.assert_close(context.states, theirs.forward_features(images), rtol=0, atol=1e-5)


def test_without_positions_permuted_patches_give_permuted_states(scramble):
    vit = scramble(ViT(**SIZES))
    images, order = torch.randn(2, 3, 24, 24), torch.randperm(9)
    patches = images.unfold(2, 8, 8).unfold(3, 8, 8).flatten(2, 3)[:, :, order]  # (B, 3, S, 8, 8)
    permuted = patches.unflatten(2, (3, 3)).transpose(3, 4).reshape(2, 3, 24, 24)
    assert (vit(permuted).states - vit(images).states[:, order]).abs().max() > 0.1
    nn.init.zeros_(vit.positions.weight)
    torch.testing.assert_close(vit(permuted).states, vit(images).states[:, order], rtol=0, atol=1e-5)


def test_drop_path_grows_with_depth():
    vit = ViT(**SIZES | {"depth": 3}, drop_path=0.2)
    assert [block.drop_path.rate for block in vit.blocks] == pytest.approx([0, 0.1, 0.2])


def test_patches_must_fill_the_image():
    with pytest.raises(ValueError, match="7 does not divide image_size 24"):
        ViT(**SIZES | {"patch_size": 7})
