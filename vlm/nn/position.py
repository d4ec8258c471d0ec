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


def sincos_2d(side: int, dim: int) -> Tensor:
    """Sines and cosines of the row and column of each cell of a square grid (He et al. 2022; Beyer et al. 2022).

    Wavelengths run from 2 cells to 200, so that neighbours differ clearly and far cells are told apart.

    Shapes:
        -> (side * side, D), values in [-1, 1]
    Raises:
        ValueError: dim is not a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"dim {dim} is not a multiple of 4, as positions on a grid need")
    frequencies = torch.pi * 100.0 ** -(torch.arange(dim // 4) / (dim // 4))  # (D/4,)
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    angles = [cells.reshape(-1, 1) * frequencies for cells in (column, row)]  # each (side * side, D/4)
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], dim=1)


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
        nn.init.normal_(self.weight, std=dim**-0.5)

    def forward(self, positions: Tensor) -> Tensor:
        return nn.functional.embedding(positions, self.weight)
