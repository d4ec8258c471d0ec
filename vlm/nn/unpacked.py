"""Unpacks texts that share rows, for layers that cannot restart inside a row."""

from typing import NamedTuple

import torch
from torch import Tensor

from vlm.nn.position import positions_within


class Unpacked(NamedTuple):
    """The texts of some rows, one per row.

    Shapes:
        places (T, M): index of each token in the flattened rows, 0 where `seen` is False; seen (T, M), rows (T,),
        lengths (T,)
    """

    places: Tensor
    seen: Tensor
    rows: Tensor
    lengths: Tensor

    def take(self, x: Tensor) -> Tensor:
        """Unpacks values of tokens: (B, L, ...) -> (T, M, ...)."""
        return x.flatten(0, 1)[self.places]

    def put(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Packs values again into rows of shape (B, L), with zeros for padding: (T, M, ...) -> (B, L, ...)."""
        flat = x.new_zeros(shape.numel(), *x.shape[2:])
        return flat.index_put((self.places[self.seen],), x[self.seen]).unflatten(0, shape)


def unpacked(tokens: Tensor, segments: Tensor | None) -> Unpacked:
    """Unpacks the texts of rows; without segments, each row is one text.

    Shapes:
        tokens (B, L), segments (B, L), 0 at padding
    """
    if segments is None:
        segments = torch.ones_like(tokens)
    place, valid = positions_within(segments), segments != 0
    first = valid & (place == 0)
    number = first.flatten().cumsum(0).view_as(segments) - 1  # index of each token's text
    lengths = torch.bincount(number[valid], minlength=int(first.sum()))
    longest = int(lengths.max()) if len(lengths) else 1  # layers do not accept texts of length 0
    index = lengths.new_zeros(len(lengths), longest)
    flat = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
    index[number[valid], place[valid]] = flat[valid]
    seen = torch.arange(longest, device=tokens.device) < lengths[:, None]
    return Unpacked(index, seen, first.nonzero()[:, 0], lengths)
