"""Positions of tokens within their segments, position encodings and relative position biases."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import Count, Range
from vlm.nn.image_size import ImageSize, format_size, grid_of


def segment_positions(segments: Tensor) -> Tensor:
    """The position of each token in its segment, from 0; segments are contiguous runs of a row.

    Segment 0 is padding, all of it at position 0, because it may be longer than any text.

    Shapes:
        segments (B, L) -> positions (B, L)
    """
    index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)  # (B, L)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return (index - torch.where(starts, index, 0).cummax(dim=1).values) * (segments != 0)


def sincos_2d(rows: int, columns: int, dim: int) -> Tensor:
    """Sine and cosine encodings of the rows and columns of a grid (He et al. 2022; Beyer et al. 2022).

    Wavelengths run from 2 to 200 cells, so that both near and far cells are distinguishable.

    Shapes:
        -> (rows * columns, D), values in [-1, 1]
    Raises:
        ValueError: dim is not a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"dim {dim} is not a multiple of 4, as positions on a grid need")
    frequencies = torch.pi * 100.0 ** -(torch.arange(dim // 4) / (dim // 4))  # (D/4,)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [cells.reshape(-1, 1) * frequencies for cells in (column, row)]  # each (rows * columns, D/4)
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], dim=1)


def interpolate_grid(table: Tensor, grid: tuple[int, int], *, before: int, image_size: ImageSize) -> Tensor:
    """Interpolates the vectors of a grid to other rows and columns (Dosovitskiy et al. 2021, 3.2), as DINOv2 does.

    Args:
        before: Number of vectors before the grid, which are copied unchanged.
        image_size: Size of the images that the table was trained for.
    Shapes:
        (before + old rows * columns, D) -> (before + rows * columns, D)
    Raises:
        ValueError: The table does not contain a grid for such images.
    """
    old_grid = grid_of(len(table) - before, image_size)
    if old_grid is None:
        raise ValueError(
            f"{len(table)} vectors are not {before} and a grid of images of {format_size(image_size)} pixels"
        )
    if old_grid == grid:
        return table
    cells = table[before:].unflatten(0, old_grid).permute(2, 0, 1)[None].float()  # (1, D, H, W)
    cells = F.interpolate(cells, size=grid, mode="bicubic", align_corners=False)
    return torch.cat([table[:before].float(), cells[0].flatten(1).T]).to(table.dtype)


@dataclass(frozen=True)
class PositionInfo:
    """Position information that every self-attention layer uses.

    Args:
        added: Added to queries, keys and values, the same in all heads.
        rotation: Cosines and sines by which queries and keys are rotated.
        bias: Added to the products of queries and keys.
    Shapes:
        added (..., L, K), rotation two of (..., L, K / 2), with an axis for the heads if there is one for rows;
        bias (N, L, S)
    """

    added: Tensor | None = None
    rotation: tuple[Tensor, Tensor] | None = None
    bias: Tensor | None = None

    def add(self, x: Tensor) -> Tensor:
        """Adds the vectors to x (B, N, L, K)."""
        return x if self.added is None else x + self.added.to(x.dtype)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates the pairs (i, i + K / 2) of each vector of x (B, N, L, K)."""
        if self.rotation is None:
            return x
        cos, sin = self.rotation
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    def prepend_prefix(self, prefix: "PositionInfo", count: int) -> "PositionInfo":
        """Position information of a prefix of `count` tokens followed by this text; the prefix gets no bias."""
        rotation = None
        if self.rotation is not None:
            pairs = zip(prefix.rotation or (None, None), self.rotation, (1.0, 0.0), strict=True)  # angle 0
            rotation = tuple(_prepend(before, text, fill, count) for before, text, fill in pairs)
        return PositionInfo(
            added=None if self.added is None else _prepend(prefix.added, self.added, 0.0, count),
            rotation=rotation,  # type: ignore[arg-type]
            bias=None if self.bias is None else F.pad(self.bias, (count, 0, count, 0)),
        )


def _prepend(prefix: Tensor | None, text: Tensor, fill: float, count: int) -> Tensor:
    """Values of `count` prefix tokens, then those of a text: (S, K) or None, and (..., L, K) -> (..., S + L, K)."""
    shape = (*text.shape[:-2], count, text.shape[-1])
    before = text.new_full(shape, fill) if prefix is None else prefix.expand(shape)
    return torch.cat([before, text], dim=-2)


NO_POSITIONS = PositionInfo()


class Positions(nn.Module):
    """Base class of position encodings. The base class itself encodes none: attention ignores the order of tokens.

    A subclass adds vectors to the input of the stack, gives position information to its layers, or both.

    Attributes:
        max_positions: Maximum number of positions; None for no limit.
    Shapes:
        positions (L,) if they are equal in all rows, else (B, L)
    """

    max_positions: int | None = None

    def check(self, max_len: int) -> None:
        """Raises a ValueError if there are fewer positions than a text may have tokens."""
        if self.max_positions is not None and self.max_positions < max_len:
            raise ValueError(
                f"{self.max_positions} positions are too few for texts of up to {max_len} tokens; give more"
            )

    def embed(self, positions: Tensor) -> Tensor | None:
        """Vectors added to the input, broadcastable to (B, L, D)."""
        return None

    def place(self, positions: Tensor, *, keys: int) -> PositionInfo:
        """Position information of the last tokens of a row with `keys` tokens."""
        return NO_POSITIONS


class LearnedPositions(Positions):
    """One learned vector per position, added to the input (Gehring et al. 2017; BERT, GPT-2, ViT).

    Args:
        dim: Width D.
        max_len: Number of positions.
    Raises:
        IndexError: A position is not less than max_len.
    """

    def __init__(self, *, dim: Count, max_len: Count) -> None:
        super().__init__()
        self.max_positions = max_len
        self.weight = nn.Parameter(torch.empty(max_len, dim))
        nn.init.normal_(self.weight, std=dim**-0.5)

    def embed(self, positions: Tensor) -> Tensor | None:
        return F.embedding(positions, self.weight)


class GridPositions(LearnedPositions):
    """Learned positions of a grid, row by row, initialised with sines and cosines of row and column.

    Starting from small random values, a short training spends most of its time on learning positions.

    Args:
        dim: Width D, a multiple of 4.
        grid: Numbers of rows and of columns.
        before: Number of tokens before the grid, such as a class token; their vectors start at zero.
    """

    def __init__(self, *, dim: Count, grid: tuple[int, int], before: int = 0) -> None:
        Positions.__init__(self)
        self.grid, self.before = grid, before
        self.weight = nn.Parameter(torch.cat([torch.zeros(before, dim), 0.5 * sincos_2d(*grid, dim)]))


class BucketedGridPositions(GridPositions):
    """Learned positions of a square grid, of which patches read those that Idefics3's code assigns to them.

    It computes the fractional coordinate of each row and column in float32 and bucketizes it. Rounding moves some
    patches to the positions of their neighbours, which then share a vector and its gradient.

    Args:
        dim: See GridPositions.
        side: Number of rows, and of columns.
    """

    def __init__(self, *, dim: Count, side: Count) -> None:
        super().__init__(dim=dim, grid=(side, side))
        bounds = torch.arange(1 / side, 1.0, 1 / side, device="cpu")
        shares = torch.arange(side, dtype=torch.float32, device="cpu") * (1.0 / torch.tensor(side, device="cpu"))
        cells = torch.bucketize(shares.clamp(max=1.0 - 1e-6), bounds, right=True)
        self.cells = (cells[:, None] * side + cells).flatten().tolist()  # the position of each patch

    @property
    def options(self) -> dict[str, int]:
        """The arguments."""
        return {"dim": self.weight.shape[1], "side": self.grid[0]}

    def embed(self, positions: Tensor) -> Tensor | None:
        return F.embedding(torch.tensor(self.cells, device=positions.device)[positions], self.weight)


class LearnedPositionsEachLayer(Positions):
    """Learned vectors P added at every layer to queries, keys and values: (V + P) softmax((K + P)ᵀ (Q + P)).

    All layers and heads share them. DETR (Carion et al. 2020) adds them at every layer too, so that deep layers need
    not carry positions along.

    Args:
        head_dim: Width K of a head.
        max_len: Number of positions.
    Raises:
        IndexError: A position is not less than max_len.
    """

    def __init__(self, *, head_dim: Count, max_len: Count) -> None:
        super().__init__()
        self.max_positions = max_len
        self.weight = nn.Parameter(torch.empty(max_len, head_dim))
        nn.init.normal_(self.weight, std=head_dim**-0.5)

    def place(self, positions: Tensor, *, keys: int) -> PositionInfo:
        added = F.embedding(positions, self.weight)
        return PositionInfo(added=added if positions.ndim == 1 else added[:, None])  # (L, K) or (B, 1, L, K)


class SinusoidalPositions(Positions):
    """Fixed sines and cosines of geometrically growing wavelengths, added to the input (Vaswani et al. 2017, 3.5).

    They are scaled by 1 / √D here, instead of scaling embeddings by √D.

    Args:
        dim: Width D, even.
    Raises:
        ValueError: dim is odd.
    """

    def __init__(self, *, dim: Count) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim {dim} is odd; sinusoidal positions need pairs")
        self.dim = dim

    def embed(self, positions: Tensor) -> Tensor | None:
        cos, sin = _cos_sin(positions, _frequencies(self.dim, 10_000.0, positions.device))  # each (..., L, D / 2)
        return torch.stack([sin, cos], dim=-1).flatten(-2) * self.dim**-0.5  # (..., L, D)


class SplitSinusoids(Positions):
    """Sinusoids with all sines before all cosines, added to scaled embeddings (Marian; TrOCR).

    Args:
        dim: Width D, even.
        base: Wavelengths run from 2π to almost 2π base.
        first: Position of a text's first token.
    Raises:
        ValueError: dim is odd.
    """

    def __init__(self, *, dim: Count, base: Annotated[float, Range(above=0)] = 10_000.0, first: int = 0) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim {dim} is odd; sinusoidal positions need pairs")
        self.options = {"dim": dim, "base": base, "first": first}
        self.dim, self.base, self.first = dim, base, first

    def embed(self, positions: Tensor) -> Tensor | None:
        # As precise as the precomputed tables of other libraries; Apple's GPUs have no float64.
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        halves = torch.arange(0, self.dim, 2, dtype=exact, device=positions.device)
        angles = (positions + self.first)[..., None] * self.base ** -(halves / self.dim)
        return torch.cat([angles.sin(), angles.cos()], dim=-1).float()  # (..., L, D)


class RotaryPositions(Positions):
    """Rotates queries and keys by angles that grow with the position (Su et al. 2021): only distances matter.

    Args:
        head_dim: Width K of a head, even.
        base: Wavelengths run from 2π to almost 2π base.
        scaling: Extension to longer texts than in pretraining: "linear" reduces all angles (Chen et al. 2023), "llama3"
            those of long waves (Llama 3.1, 2024).
        factor: Divisor of the angles.
        low_freq_factor, high_freq_factor: For "llama3", numbers of periods in trained_len: waves with at most the first
            number are divided by `factor`, with at least the second unchanged, others interpolated.
        trained_len: Length of the texts in pretraining.
    Raises:
        ValueError: head_dim is odd.
    """

    def __init__(
        self,
        *,
        head_dim: Count,
        base: Annotated[float, Range(above=0)] = 10_000.0,
        scaling: Literal["linear", "llama3"] | None = None,
        factor: Annotated[float, Range(1)] = 1.0,
        low_freq_factor: Annotated[float, Range(above=0)] = 1.0,
        high_freq_factor: Annotated[float, Range(above=0)] = 4.0,
        trained_len: Count = 8192,
    ) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim {head_dim} is odd; rotary positions need pairs")
        self.head_dim, self.base, self.scaling, self.factor = head_dim, base, scaling, factor
        self.low_freq_factor, self.high_freq_factor, self.trained_len = low_freq_factor, high_freq_factor, trained_len

    def place(self, positions: Tensor, *, keys: int) -> PositionInfo:
        waves = _cos_sin(positions, self.frequencies(positions.device))
        cos, sin = waves if positions.ndim == 1 else (wave[:, None] for wave in waves)  # (L, K/2) or (B, 1, L, K/2)
        return PositionInfo(rotation=(cos, sin))

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Angle per position of each pair, (K / 2,)."""
        frequencies = _frequencies(self.head_dim, self.base, device)
        if self.scaling is None:
            return frequencies
        if self.scaling == "linear":
            return frequencies / self.factor
        turns = self.trained_len * frequencies / (2 * math.pi)
        unscaled = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (unscaled + (1 - unscaled) / self.factor)

    @property
    def options(self) -> dict[str, Any]:
        """The constructor's arguments."""
        long = ("low_freq_factor", "high_freq_factor", "trained_len") if self.scaling == "llama3" else ()
        names = ("head_dim", "base", *(("scaling", "factor", *long) if self.scaling else ()))
        return {name: getattr(self, name) for name in names}


class RelativeBias(Positions):
    """One learned bias per head and offset, added to the products (Shaw et al. 2018; Raffel et al. 2020, 2.1).

    All layers share it, as in T5.

    Args:
        num_heads: Number N of heads.
        max_len: Offsets from max_len on share one parameter.
        causal: Whether queries attend only to earlier tokens; else there are offsets in both directions.
    """

    def __init__(self, *, num_heads: Count, max_len: Count, causal: bool = True) -> None:
        super().__init__()
        self.max_len, self.causal = max_len, causal
        self.weight = nn.Parameter(torch.zeros(num_heads, max_len if causal else 2 * max_len - 1))

    def place(self, positions: Tensor, *, keys: int) -> PositionInfo:
        # Segments are contiguous, so offsets within the row equal offsets within the segment.
        key = torch.arange(keys, device=positions.device)
        query = key[keys - positions.shape[-1] :]
        return PositionInfo(bias=self.weight[:, self.columns(query[:, None] - key)])  # (N, L, S)

    def columns(self, offsets: Tensor) -> Tensor:
        """The column of the parameters for each offset, which is the query's position minus the key's."""
        furthest = self.max_len - 1
        offsets = offsets.clamp(0 if self.causal else -furthest, furthest)
        return offsets if self.causal else offsets + furthest


def _frequencies(dim: int, base: float, device: torch.device | None) -> Tensor:
    """Frequencies from 1 down to almost 1 / base, (dim / 2,)."""
    return base ** -(torch.arange(0, dim, 2, device=device) / dim)


def _cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (..., L) at some frequencies (F,), each (..., L, F)."""
    angles = positions[..., None] * frequencies
    return angles.cos(), angles.sin()


class BucketedBias(RelativeBias):
    """T5's biases: short offsets have one each, longer ones share them by their logarithm (Raffel et al. 2020, 2.1).

    With 8 buckets and furthest=20, causal:

        offset     0   1   2   3   4   5   6   7   8   9 .. 13   14 ...
        bucket     0   1   2   3   4   4   5   5   5   6         7

    Args:
        num_heads: Number N of heads.
        buckets: Number of biases per head; half of those of a direction belong to a single offset each.
        furthest: Offsets from this one on share the last bias.
        causal: Whether queries attend only to earlier tokens; else half of the buckets are for later ones.
    """

    def __init__(self, *, num_heads: Count, buckets: Count = 32, furthest: Count = 128, causal: bool = True) -> None:
        nn.Module.__init__(self)
        if buckets < 4 or buckets % 4:
            raise ValueError(f"buckets {buckets} is not a multiple of 4; half of each direction's are for one offset")
        if furthest <= buckets // 2:
            raise ValueError(f"furthest {furthest} is not more than half of the {buckets} buckets; give more")
        self.options = {"num_heads": num_heads, "buckets": buckets, "furthest": furthest, "causal": causal}
        self.buckets, self.furthest, self.causal = buckets, furthest, causal
        self.weight = nn.Parameter(torch.zeros(num_heads, buckets))

    def columns(self, offsets: Tensor) -> Tensor:
        count = self.buckets if self.causal else self.buckets // 2
        later = 0 if self.causal else (offsets < 0) * count
        offsets = offsets.clamp(min=0) if self.causal else offsets.abs()
        single = count // 2
        ratio = (offsets.clamp(min=1) / single).log() / math.log(self.furthest / single)
        shared = (single + (ratio * (count - single)).long()).clamp(max=count - 1)
        return later + torch.where(offsets < single, offsets, shared)
