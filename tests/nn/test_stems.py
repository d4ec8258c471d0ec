"""Stems: images to patches of the right number, every weight of use."""

import pytest
import torch

from vlm.nn.stems import ConvPoolStem, ConvStem, PatchEmbed

STEMS = [PatchEmbed, ConvStem, ConvPoolStem]


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
