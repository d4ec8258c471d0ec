"""Encoder outputs that a decoder attends to."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Context:
    """Encoder states and their mask.

    Shapes:
        states (B, S, D), mask bool (B, S), True for states that may be attended to, or None for all
    """

    states: Tensor
    mask: Tensor | None = None

    def rows(self, rows: slice | Tensor) -> "Context":
        """The context of a subset of rows."""
        return Context(self.states[rows], None if self.mask is None else self.mask[rows])

    def one_text_per_row(self, layout: Tensor | None) -> "Context":
        """Splits packed rows: returns a context with one text per row.

        Args:
            layout: See InputRows; None if each row already holds one text.
        Shapes:
            states (B, L, D), layout (N, S) -> states (N, S, D)
        """
        if layout is None:
            return self
        states = self.states.flatten(0, 1).index_select(0, layout.clamp(min=0).flatten())
        return Context(states.unflatten(0, layout.shape), layout >= 0)

    def padded(self, length: int) -> "Context":
        """Pads the states to a length; the padding is masked."""
        more = length - self.states.shape[1]
        if more <= 0:
            return self
        return Context(F.pad(self.states, (0, 0, 0, more)), F.pad(self.full_mask, (0, more)))

    @property
    def full_mask(self) -> Tensor:
        """The mask as a tensor, even if all states are visible: (B, S)."""
        return self.mask if self.mask is not None else self.states.new_ones(self.states.shape[:2], dtype=torch.bool)


def concat_states(parts: Sequence[Context]) -> Context:
    """Concatenates contexts of the same inputs along the states.

    Shapes:
        states (B, S1, D), (B, S2, D), ... -> (B, S1 + S2 + ..., D)
    """
    masked = any(part.mask is not None for part in parts)
    states = torch.cat([part.states for part in parts], dim=1)
    return Context(states, torch.cat([part.full_mask for part in parts], dim=1) if masked else None)


def concat_batches(parts: Sequence[Context]) -> Context:
    """Concatenates contexts of several batches along the rows, padded to the longest."""
    length = max(part.states.shape[1] for part in parts)
    parts = [part.padded(length) for part in parts]
    masked = any(part.mask is not None for part in parts)
    return Context(
        torch.cat([part.states for part in parts]), torch.cat([part.full_mask for part in parts]) if masked else None
    )
