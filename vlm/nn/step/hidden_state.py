"""The decoding state of a decoder with a fixed number of tensors instead of a cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vlm.nn.step.state import ReadContext, replaced


class HiddenState:
    """Hidden tensors of B rows with G beams each; rows may begin and end at any step.

    Attributes:
        hidden: The hidden tensors.
        context: Keys and values of the context, as in `ReadContext`.
        mask: States that may be attended to; None for all.
        length: Number of steps taken so far.
    Args:
        read: Initial hidden tensors and context, of each row, or of one row for all.
        rows: Number B of rows.
        beams: Number G of beams per row.
        starts: Step of each row's first token, (B,); None if all begin at 0. Earlier tokens are padding.
    Shapes:
        hidden (B, G, ...) each, mask (B, S) or None
    """

    def __init__(self, read: ReadContext, *, rows: int, beams: int, starts: Tensor | None = None) -> None:
        self.context, self.mask = read.keys_values, read.mask
        self.beams, self.starts, self.length = beams, starts, 0
        self.hidden = [one[:, None].expand(rows, beams, *one.shape[1:]).clone() for one in read.hidden]

    def advance(self, hidden: Sequence[Tensor]) -> None:
        """Stores the hidden tensors after a token, except in rows whose text has not begun."""
        if self.starts is not None:
            begun = self.starts <= self.length
            pairs = zip(hidden, self.hidden, strict=True)
            hidden = [torch.where(_over(begun, new), new, old) for new, old in pairs]
        self.hidden = list(hidden)
        self.length += 1

    def select(self, rows: Tensor) -> None:
        """Keeps only these rows (B',), in this order."""
        self.hidden = [one[rows] for one in self.hidden]
        self.context = [None if kv is None else (kv[0][rows], kv[1][rows]) for kv in self.context]
        self.mask = None if self.mask is None else self.mask[rows]
        self.starts = None if self.starts is None else self.starts[rows]

    def replace(self, rows: Tensor, read: ReadContext) -> None:
        """Starts new texts in these rows (B',), after their context."""
        self.context, self.mask = replaced(self.context, self.mask, rows, read.keys_values, read.mask)
        for held, new in zip(self.hidden, read.hidden, strict=True):
            held[rows] = new[:, None]
        if self.starts is not None:
            self.starts[rows] = self.length

    def reorder_beams(self, parents: Tensor) -> None:
        """Reorders beams: beam g of row b continues beam parents[b, g], (B, G)."""
        self.hidden = [one.gather(1, _over(parents, one).expand_as(one)) for one in self.hidden]


def _over(x: Tensor, like: Tensor) -> Tensor:
    """Adds trailing axes to a tensor so that it broadcasts over `like`."""
    return x.view(*x.shape, *[1] * (like.ndim - x.ndim))
