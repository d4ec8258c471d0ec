"""Positions of tokens: where a token stands in its segment, and encodings of it."""

import torch
from torch import Tensor, nn


def positions_within(segments: Tensor) -> Tensor:
    """The place of each token in its segment, counted from 0; segments are contiguous runs of a row.

    Segment 0 is padding, which may be longer than any text: all of it is at position 0.

    Shapes:
        segments (B, L) -> positions (B, L)
    """
    index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)  # (B, L)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return (index - torch.where(starts, index, 0).cummax(dim=1).values) * (segments != 0)


class LearnedPositions(nn.Module):
    """One learned vector a position, added to the input (Gehring et al. 2017; BERT, GPT-2, ViT).

    Shapes:
        positions (B, L) -> (B, L, D)
    Raises:
        IndexError: A position is not below max_len.
    """

    def __init__(self, *, dim: int, max_len: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_len, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        return nn.functional.embedding(positions, self.weight)
