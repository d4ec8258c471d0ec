"""Targets of next-token prediction, made in the loader from tensors on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = 0  # the segment of padding; the texts of a row are segments 1, 2, ...
IGNORE = -100  # the label of a position that has nothing to predict


def next_token_labels(tokens: Tensor, segments: Tensor | None) -> Tensor:
    """The token that each position has to predict: the next one of its own segment.

    This is the one place of the package where labels are shifted.

    Args:
        segments: None where each row is one segment.
    Shapes:
        tokens (B, L), segments (B, L) -> labels (B, L), IGNORE at the last token of a segment and in padding
    """
    labels = torch.full_like(tokens, IGNORE)
    if segments is None:
        labels[:, :-1] = tokens[:, 1:]
        return labels
    follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != PADDING)
    labels[:, :-1] = torch.where(follows, tokens[:, 1:], IGNORE)
    return labels


def window_targets(tokens: Tensor, segments: Tensor | None, scored: Tensor | None = None) -> "Targets":
    """The targets of all tokens but each row's last, which is only predicted.

    Args:
        scored: The tokens that count when they are predicted; None for all.
    Shapes:
        tokens (B, L+1), segments (B, L+1) or None, scored bool (B, L+1) or None -> targets of (B, L)
    """
    labels = next_token_labels(tokens, segments)[:, :-1]
    return Targets.of(labels if scored is None else labels.masked_fill(~scored[:, 1:], IGNORE))


@dataclass
class Targets:
    """The labelled positions of a batch and their labels.

    Picking positions by a mask of bools makes the host wait for the device, since their number is a value there. Found
    in the loader, positions and number are known.

    Args:
        places: Index of each labelled position in the rows end to end; None where all are labelled.
    Shapes:
        labels (T,), places (T,) or None
    """

    labels: Tensor
    places: Tensor | None

    @classmethod
    def of(cls, labels: Tensor) -> "Targets":
        """The targets of labels (B, L), IGNORE where there is none."""
        flat = labels.flatten()
        places = (flat != IGNORE).nonzero()[:, 0]
        # Picking all, as of windows of text, would only copy, forward and backward.
        return cls(flat, None) if len(places) == len(flat) else cls(flat[places], places)

    @property
    def count(self) -> int:
        """Number T of labelled positions."""
        return len(self.labels)

    def pick(self, hidden: Tensor) -> Tensor:
        """The labelled positions: (B, L, D) -> (T, D)."""
        rows = hidden.flatten(0, 1)
        return rows if self.places is None else rows.index_select(0, self.places)

    def pin_memory(self) -> "Targets":
        places = None if self.places is None else self.places.pin_memory()
        return Targets(self.labels.pin_memory(), places)
