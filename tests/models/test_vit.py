"""The ViT against timm's; tests/checkpoint compare it with Hugging Face's."""

import pytest
import timm
import torch
from torch import nn

from vlm.models.vit import ViT
from vlm.nn.embeddings import ConvStem
from vlm.nn.image_size import sides
from vlm.nn.position import (
    LearnedPositions,
    LearnedPositionsEachLayer,
    Positions,
    RelativeBias,
    RotaryPositions,
    SinusoidalPositions,
)

SIZES = {"image_size": 24, "patch_size": 8, "dim": 12, "depth": 2, "num_heads": 3}
VARIANTS = {
    "grid": dict,
    "learned": lambda: {"positions": LearnedPositions(dim=12, max_len=9)},
    "each_layer": lambda: {"positions": LearnedPositionsEachLayer(head_dim=4, max_len=9)},
    "rotary": lambda: {"positions": RotaryPositions(head_dim=4)},
    "relative": lambda: {"positions": RelativeBias(num_heads=3, max_len=9, causal=False)},
    "sinusoidal": lambda: {"positions": SinusoidalPositions(dim=12)},
    "no_positions": lambda: {"positions": Positions()},
    "class_token": lambda: {"class_token": True},
    "two_tokens": lambda: {"class_token": True, "distillation_token": True},
    "embed_norm": lambda: {"embed_norm": True, "activation": "quick_gelu"},
    "conv_stem": lambda: {"stem": ConvStem(patch_size=8, dim=12)},
    "post_norm": lambda: {"pre_norm": False, "activation": "relu"},
    "modern": lambda: {"norm": "rms", "activation": "swiglu", "bias": False, "qk_norm": True, "num_kv_heads": 1},
}


@pytest.fixture(params=VARIANTS)
def vit(request, scramble):
    return scramble(ViT(**SIZES, **VARIANTS[request.param]()))


def like_timm(theirs, **options):
    """Our ViT with the weights of timm's."""
    state = {name.replace("patch_embed.proj", "patch_embed"): tensor for name, tensor in theirs.state_dict().items()}
    state["positions.weight"] = state.pop("pos_embed")[0]
    if "cls_token" in state:
        state["class_token"] = state.pop("cls_token").flatten()
    ours = ViT(**options, class_token="class_token" in state, norm_eps=1e-6).eval()
    ours.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith("head.")})
    return ours


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("size", [24, (64, 512)])
def test_equals_timm(scramble, class_token, size):
    sizes = {"patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 0, "fc_norm": False}
    pooling = {"class_token": class_token, "global_pool": "token" if class_token else "avg"}
    theirs = timm.create_model("vit_tiny_patch16_224", img_size=size, **sizes, **pooling)
    ours = like_timm(scramble(theirs), **SIZES | {"image_size": size})
    images = torch.randn(2, 3, *sides(size))
    context = ours(images)
    assert context.states.shape == (2, (9 if size == 24 else 512) + class_token, 12) and context.mask is None
    torch.testing.assert_close(context.states, theirs.forward_features(images), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_equals_timm_at_its_real_sizes():
    theirs = timm.create_model("vit_tiny_patch16_224").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # so that what starts at zero or one is seen too
            parameter.add_(0.05 * torch.randn_like(parameter))
    ours = like_timm(theirs, image_size=224, patch_size=16, dim=192, depth=12, num_heads=3)
    images = torch.randn(1, 3, 224, 224)
    states, truth = ours(images).states, theirs.forward_features(images)
    assert states.shape == (1, 197, 192) and truth.std() > 0.5
    torch.testing.assert_close(states, truth, rtol=0, atol=1e-4)


def test_every_parameter_gets_a_gradient(vit):
    states = vit(torch.randn(2, 3, 24, 24)).states
    (states * torch.randn_like(states)).sum().backward()
    assert not [name for name, p in vit.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


def permute_patches(images, order):
    """The images with their patches in another order."""
    patches = images.unfold(2, 8, 8).unfold(3, 8, 8).flatten(2, 3)[:, :, order]  # (B, 3, S, 8, 8)
    return patches.unflatten(2, (3, 3)).transpose(3, 4).reshape(2, 3, 24, 24)


def test_patches_are_told_apart_by_their_place_only(request, vit):
    name = request.node.callspec.params["vit"]
    images, order = torch.randn(2, 3, 24, 24), torch.randperm(9)
    before, after = vit(images).states[:, -9:][:, order], vit(permute_patches(images, order)).states[:, -9:]
    if name == "no_positions":
        torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    elif name != "conv_stem":  # whose patches see those beside them
        assert (after - before).abs().max() > 0.01
        if name in ("grid", "class_token", "two_tokens", "embed_norm", "post_norm", "modern"):
            nn.init.zeros_(vit.positions.weight)
            before, after = vit(images).states[:, -9:][:, order], vit(permute_patches(images, order)).states[:, -9:]
            torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


def test_drop_path_grows_with_depth():
    vit = ViT(**SIZES | {"depth": 3}, drop_path=0.2)
    assert [block.drop_path.rate for block in vit.blocks] == pytest.approx([0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distillation_token": True}, "set class_token=true"),
        ({"image_size": (24, 30)}, r"8 does not divide image_size \[24, 30\]"),
        ({"patch_size": 7}, "7 does not divide image_size 24"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        ViT(**SIZES | options)
