"""Stems: modules that turn an image into patch embeddings."""

from itertools import pairwise

import torch
from torch import nn

from vlm.errors import Count


class PatchEmbed(nn.Conv2d):
    """Splits the image into patches and projects each linearly (Dosovitskiy et al. 2021, equation 1).

    Args:
        patch_size: Side of a square patch, in pixels.
        dim: Width D of an embedding.
    Shapes:
        images (B, 3, H, W) -> (B, D, H / patch_size, W / patch_size)
    """

    def __init__(self, *, patch_size: Count, dim: Count) -> None:
        super().__init__(3, dim, kernel_size=patch_size, stride=patch_size)


class ConvStem(nn.Sequential):
    """Reduces the image to patches by small convolutions (after Xiao et al. 2021, "Early convolutions").

    From scratch it learns in far fewer steps than one linear projection, because it detects a pattern anywhere in a
    patch. The first convolution has kernel and stride 4, since a stride of 2 would cost more than all later layers
    together; each further one halves the sides and doubles the channels, up to D.

    Args:
        patch_size: Side of a square patch, in pixels; a power of two, at least 4.
        dim: Width D of an embedding.
        min_channels: Minimum number of channels of the first convolution.
    Shapes:
        images (B, 3, H, W) -> (B, D, H / patch_size, W / patch_size)
    Raises:
        ValueError: patch_size is not a power of two, or below 4.
    """

    def __init__(self, *, patch_size: Count, dim: Count, min_channels: Count = 32) -> None:
        stages = _stages(patch_size)
        channels = [max(min_channels, dim >> (stages - 1 - stage)) for stage in range(stages)]
        convs = [nn.Conv2d(3, channels[0], kernel_size=4, stride=4)]
        convs += [nn.Conv2d(a, b, kernel_size=3, stride=2, padding=1) for a, b in pairwise(channels)]
        layers: list[nn.Module] = []
        for conv in convs:
            nn.init.kaiming_normal_(conv.weight)
            nn.init.constant_(conv.bias, 0.0)  # type: ignore[arg-type]
            layers += [conv, nn.GroupNorm(1, conv.out_channels), nn.GELU()]
        super().__init__(*layers, nn.Conv2d(channels[-1], dim, kernel_size=1))


class ConvPoolStem(nn.Sequential):
    """Reduces the image to patches by convolutions and pooling (after Hassani et al. 2021, "Compact Transformers").

    Overlapping pools lose less of small images than strides do, so it learns more from thousands of images (rather than
    millions). Pooling comes before normalisation and ReLU, which then process a quarter of the elements, and memory is
    channels-last: together they cut the time of the stem on a CPU to a third.

    Args:
        patch_size: Side of a square patch, in pixels; a power of two, at least 2 * stride.
        dim: Width D of an embedding.
        channels: Channels of the first convolution; each further one doubles them.
        stride: Stride of the first convolution: 2 for photos; 1, which costs more, for tiny images.
    Shapes:
        images (B, 3, H, W) -> (B, D, H / patch_size, W / patch_size)
    Raises:
        ValueError: patch_size is not a power of two, or too small; stride is not 1 or 2.
    """

    def __init__(self, *, patch_size: Count, dim: Count, channels: Count = 32, stride: Count = 2) -> None:
        if stride not in (1, 2):
            raise ValueError(f"stride {stride} is not 1 or 2")
        stages = _stages(patch_size, first=2 * stride)
        widths = [3, *(channels << stage for stage in range(stages))]
        layers: list[nn.Module] = []
        for stage, (before, after) in enumerate(pairwise(widths)):
            size, step = (5, 2) if stage == 0 and stride == 2 else (3, 1)
            conv = nn.Conv2d(before, after, size, stride=step, padding=size // 2, bias=False)
            nn.init.kaiming_normal_(conv.weight)
            layers += [conv, nn.MaxPool2d(3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(widths[-1], dim, kernel_size=1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images.contiguous(memory_format=torch.channels_last))


def _stages(patch_size: int, first: int = 4) -> int:
    """Number of convolutions that reduce the sides by patch_size, the first by 2 or 4 and each other by 2."""
    stages = patch_size.bit_length() - first.bit_length() + 1
    if stages < 1 or first << (stages - 1) != patch_size:
        sizes = ", ".join(str(first << stage) for stage in range(4))
        raise ValueError(f"patch_size {patch_size} is not {sizes}, ..., as a stem of convolutions needs")
    return stages
