"""The field of training images that are stored on the device: their indices and augmentation parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlm.data.batch import DeviceImages
from vlm.data.fields import AugmentKey, Field, ImageField
from vlm.data.images.batched import NUMBERS, draw
from vlm.data.images.image import ImageError
from vlm.data.records import Record


class DeviceImageField(Field):
    """Replaces images by their indices on the device and their augmentation parameters.

    Args:
        images: The field that it replaces.
        size: Width and height of the images.
        faults: Reasons, by index, why images could not be read.
    Shapes:
        DeviceImages of index (B,), numbers (B, NUMBERS)
    """

    def __init__(self, images: ImageField, size: tuple[int, int], faults: Mapping[int, str]) -> None:
        self.images, self.size, self.faults = images, size, faults

    def encode(self, record: Record, key: AugmentKey | None) -> tuple[int, Tensor]:
        assert key is not None, "images are stored on the device for training only"
        index = int(key[2])
        if index in self.faults:
            raise ImageError(self.faults[index])
        augment = self.images.augment_of(record)
        return index, torch.zeros(NUMBERS) if augment is None else draw(augment, self.size, key)

    def collate(self, values: Sequence[tuple[int, Tensor]]) -> Any:
        index = torch.tensor([index for index, _ in values], dtype=torch.long)
        return DeviceImages(index, torch.stack([row for _, row in values]) if values else torch.empty(0, NUMBERS))
