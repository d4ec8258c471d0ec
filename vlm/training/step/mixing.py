"""MixUp and CutMix of a batch."""

from collections.abc import Callable

import torch
from torch import Tensor

from vlm.errors import UserError
from vlm.models.frozen_features import Features


class Mixing:
    """Mixes each image of a batch with another one, and their labels alike, by torchvision's transforms.

    Partners and shares are drawn from torch's own generator, which a training step seeds by its keys.

    Args:
        mixup: Alpha of MixUp (Zhang et al. 2018), which blends two images; 0 is off.
        cutmix: Alpha of CutMix (Yun et al. 2019), which pastes a box of one into the other; 0 is off. With both, one is
            drawn for each batch.
        num_classes: Number C of classes.
    Shapes:
        images (B, 3, H, W), labels (B,) -> images, and labels or the share of each class (B, C)
        features are returned unchanged if nothing is mixed
    Raises:
        UserError: An alpha is negative.
    """

    def __init__(self, *, mixup: float, cutmix: float, num_classes: int) -> None:
        from torchvision.transforms import v2

        for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
            if alpha < 0:
                raise UserError(f"task.{name}: {alpha:g} is below 0; give the alpha of a beta distribution, or 0")
        kinds: list[tuple[Callable[..., Callable], float]] = [(v2.MixUp, mixup), (v2.CutMix, cutmix)]
        self.choices = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha]

    def __call__(self, images: Tensor | Features, labels: Tensor) -> tuple[Tensor | Features, Tensor]:
        if not self.choices or not len(labels):
            return images, labels
        return self.choices[int(torch.randint(len(self.choices), ()))](images, labels)
