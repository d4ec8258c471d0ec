"""Encoded inputs, as an encoder hands them to a decoder."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Context:
    """Encoded states that a decoder attends to.

    Shapes:
        states (B, S, D), mask bool (B, S), True = may be attended to, or None where all may
    """

    states: Tensor
    mask: Tensor | None = None

    def rows(self, rows: slice | Tensor) -> "Context":
        """The context of some of the inputs."""
        return Context(self.states[rows], None if self.mask is None else self.mask[rows])

    def apart(self, layout: Tensor | None) -> "Context":
        """The states of each text in a row of its own, of rows that hold several.

        Args:
            layout: As in InputRows; None for rows of one text each.
        Shapes:
            states (B, L, D), layout (N, S) -> states (N, S, D)
        """
        if layout is None:
            return self
        states = self.states.flatten(0, 1).index_select(0, layout.clamp(min=0).flatten())
        return Context(states.unflatten(0, layout.shape), layout >= 0)

    def padded(self, length: int) -> "Context":
        """The same with further states, up to a length, that may not be attended to."""
        more = length - self.states.shape[1]
        if more <= 0:
            return self
        return Context(F.pad(self.states, (0, 0, 0, more)), F.pad(self.seen, (0, more)))

    @property
    def seen(self) -> Tensor:
        """The mask, written out where all may be attended to: (B, S)."""
        return self.mask if self.mask is not None else self.states.new_ones(self.states.shape[:2], dtype=torch.bool)


def beside(parts: Sequence[Context]) -> Context:
    """Contexts of the same inputs as one: the states of each part after those of the part before.

    Shapes:
        states (B, S1, D), (B, S2, D), ... -> (B, S1 + S2 + ..., D)
    """
    masked = any(part.mask is not None for part in parts)
    states = torch.cat([part.states for part in parts], dim=1)
    return Context(states, torch.cat([part.seen for part in parts], dim=1) if masked else None)


def joined(parts: Sequence[Context]) -> Context:
    """Contexts of several batches as one, padded to the longest."""
    length = max(part.states.shape[1] for part in parts)
    parts = [part.padded(length) for part in parts]
    masked = any(part.mask is not None for part in parts)
    return Context(
        torch.cat([part.states for part in parts]), torch.cat([part.seen for part in parts]) if masked else None
    )
