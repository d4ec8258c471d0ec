"""The image field for a control evaluation that exchanges images."""

import torch
from torch import Tensor

from vlm.data.fields import AugmentKey, ImageField
from vlm.data.pairs import Paired
from vlm.data.records import Record, Split


class PairedImageField(ImageField):
    """The image of a record; in evaluation together with that of its partner.

    Args:
        others: See ImageField.
    Shapes:
        uint8 (B, 3, H, W) in training, (B, 2, 3, H, W) in evaluation
    """

    def view(self, name: str, split: Split, *, training: bool, limit: int | None = None) -> Split:
        split = super().view(name, split, training=training, limit=limit)
        return split if training else Paired(split)

    def encode(self, record: Record, key: AugmentKey | None) -> Tensor:
        own = super().encode(record, key)
        return own if key is not None else torch.stack([own, super().encode(record["other"], None)])
