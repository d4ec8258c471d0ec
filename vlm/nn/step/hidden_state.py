"""The state of decoding with a decoder that remembers by a fixed number of vectors: recurrent, or over a window."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Beginning:
    """What a recurrent decoder takes from the context of each of B rows.

    Args:
        hidden: Hidden tensors before the first token.
        memory: Tensors of the context's S states, to which each step attends; empty for a decoder without attention.
        mask: States that may be attended to; None if all may.
    Shapes:
        hidden (B, ...) each, memory (B, S, ...) each, mask (B, S)
    """

    hidden: Sequence[Tensor]
    memory: Sequence[Tensor] = ()
    mask: Tensor | None = None

    def padded(self, length: int) -> "Beginning":
        """The same with memory of `length` states, of which those that are new are masked."""
        if not self.memory or (more := length - self.memory[0].shape[1]) == 0:
            return self
        states = self.memory[0]
        seen = states.new_ones(states.shape[:2], dtype=torch.bool) if self.mask is None else self.mask
        memory = [F.pad(one, (0, 0) * (one.ndim - 2) + (0, more)) for one in self.memory]
        return Beginning(self.hidden, memory, F.pad(seen, (0, more)))


class HiddenState:
    """Hidden tensors of B rows with G beams each; rows may begin at any step.

    The interface is that of `DecodeState`: `select`, `replace`, `reorder_beams` and `length` are all that a search
    knows of a state.

    Args:
        beginning: Of the B rows.
        beams: Number G of beams per row.
        starts: Step of each row's first token, (B,); None if all begin at 0. Earlier tokens are padding.
    Shapes:
        hidden (B, G, ...) each
    """

    def __init__(self, beginning: Beginning, *, beams: int, starts: Tensor | None = None) -> None:
        self.beginning, self.beams, self.starts, self.length = beginning, beams, starts, 0
        self.hidden = self._spread(beginning.hidden)

    def _spread(self, hidden: Sequence[Tensor]) -> list[Tensor]:
        return [one[:, None].repeat(1, self.beams, *[1] * (one.ndim - 1)) for one in hidden]

    def advance(self, hidden: Sequence[Tensor]) -> None:
        """Takes the hidden tensors after a token, except in rows whose text has not begun."""
        if self.starts is not None and self.length < int(self.starts.max()):
            begun = self.starts <= self.length
            pairs = zip(hidden, self.hidden, strict=True)
            hidden = [torch.where(begun.view(-1, *[1] * (new.ndim - 1)), new, old) for new, old in pairs]
        self.hidden = list(hidden)
        self.length += 1

    def select(self, rows: Tensor) -> None:
        """Keeps these rows, in this order."""
        held = self.beginning
        mask = None if held.mask is None else held.mask[rows]
        self.beginning = Beginning([one[rows] for one in held.hidden], [one[rows] for one in held.memory], mask)
        self.hidden = [one[rows] for one in self.hidden]
        self.starts = None if self.starts is None else self.starts[rows]

    def replace(self, rows: Tensor, beginning: Beginning, mask: Tensor | None = None) -> None:
        """Gives rows to new texts, which begin at the next step."""
        held = self.beginning
        if held.memory:
            length = max(held.memory[0].shape[1], beginning.memory[0].shape[1])
            held, beginning = held.padded(length), beginning.padded(length)
            if (held.mask is None) != (beginning.mask is None):
                sizes = held.memory[0].shape[:2], beginning.memory[0].shape[:2]
                full = [held.memory[0].new_ones(size, dtype=torch.bool) for size in sizes]
                held.mask = full[0] if held.mask is None else held.mask
                beginning.mask = full[1] if beginning.mask is None else beginning.mask
        for old, new in zip([*held.hidden, *held.memory], [*beginning.hidden, *beginning.memory], strict=True):
            old[rows] = new
        if held.mask is not None and beginning.mask is not None:
            held.mask[rows] = beginning.mask
        for old, new in zip(self.hidden, self._spread(beginning.hidden), strict=True):
            old[rows] = new
        self.beginning = held

    def reorder_beams(self, parents: Tensor) -> None:
        """Beam g of row b goes on from beam parents[b, g]: (B, G)."""
        self.hidden = [
            one.gather(1, parents.view(*parents.shape, *[1] * (one.ndim - 2)).expand_as(one)) for one in self.hidden
        ]
