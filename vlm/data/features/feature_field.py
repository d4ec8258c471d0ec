"""The field of cached image features."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vlm.data.features.feature_file import FeatureFile
from vlm.data.fields import AugmentKey, ImageField
from vlm.data.records import Record
from vlm.models.frozen_features import Features


class FeatureField(ImageField):
    """Replaces images by cached features of a frozen encoder.

    Args:
        images: The field that it replaces.
        file: The features by index.
    Shapes:
        Features of values (B, S, C)
    """

    def __init__(self, images: ImageField, file: FeatureFile) -> None:
        super().__init__(preprocess=images.preprocess, augment=images.augment)
        self.file = file

    def encode(self, record: Record, key: AugmentKey | None) -> Tensor:
        assert key is not None, "features are cached for training only"
        return self.file.read(int(key[2]))

    def collate(self, values: Sequence[Tensor]) -> Any:
        layout = self.file.layout
        return Features(torch.stack(list(values)) if values else torch.empty(0, layout.states, layout.width))
