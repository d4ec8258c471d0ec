"""Stems: images to patches of the right number, every weight of use."""

from functools import partial

import pytest
import torch
from torch.nn import functional

from vlm.nn.embeddings import ConvPoolStem, ConvStem, PatchEmbed

tiny = partial(ConvPoolStem, stride=1)
STEMS = [PatchEmbed, ConvStem, ConvPoolStem, tiny]


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("patch_size", [4, 8, 16, 32])
def test_a_patch_for_each_square_of_the_image(stem, patch_size):
    images = torch.randn(2, 3, 3 * patch_size, 2 * patch_size)
    assert stem(patch_size=patch_size, dim=12)(images).shape == (2, 12, 3, 2)


@pytest.mark.parametrize("stem", STEMS)
def test_every_parameter_gets_a_gradient_and_every_pixel_counts(stem):
    layer = stem(patch_size=8, dim=12)
    images = torch.randn(4, 3, 16, 16, requires_grad=True)
    out = layer(images)
    (out * torch.randn_like(out)).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())
    assert (images.grad.abs().sum((0, 1)) > 0).all()


@pytest.mark.parametrize("stem", [ConvStem, ConvPoolStem])
@pytest.mark.parametrize("patch_size", [1, 2, 6, 14, 24])
def test_sizes_that_no_halving_gives_are_refused(stem, patch_size):
    with pytest.raises(ValueError, match=f"patch_size {patch_size} is not 4, 8, 16"):
        stem(patch_size=patch_size, dim=12)


def test_two_pixels_a_patch_are_for_tiny_images_alone():
    assert tiny(patch_size=2, dim=12)(torch.randn(2, 3, 6, 4)).shape == (2, 12, 3, 2)
    with pytest.raises(ValueError, match="patch_size 3 is not 2, 4, 8"):
        tiny(patch_size=3, dim=12)
    with pytest.raises(ValueError, match="stride 3 is not 1 or 2"):
        ConvPoolStem(patch_size=8, dim=12, stride=3)


@pytest.mark.parametrize("stem", [ConvPoolStem, tiny])
def test_a_stage_convolves_pools_normalises_and_rectifies_in_plain_layout_too(stem):
    torch.manual_seed(0)
    layer = stem(patch_size=4, dim=12)
    images = torch.randn(4, 3, 16, 16)
    expected = images
    convs, norms = ([m for m in layer if isinstance(m, kind)] for kind in (torch.nn.Conv2d, torch.nn.BatchNorm2d))
    for conv, norm in zip(convs[:-1], norms, strict=True):
        wide = functional.conv2d(expected, conv.weight, stride=conv.stride, padding=conv.padding)
        small = functional.max_pool2d(wide, 3, stride=2, padding=1)
        expected = functional.batch_norm(small, None, None, norm.weight, norm.bias, training=True).relu()
    expected = functional.conv2d(expected, convs[-1].weight, convs[-1].bias)
    torch.testing.assert_close(layer(images), expected, atol=1e-4, rtol=1e-4)
