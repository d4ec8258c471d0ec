"""What a training step reads: rows that hold all captions of an image end to end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vlm.data.text.targets import PADDING, Targets, next_token_labels


@dataclass
class Sample:
    """One image with its captions as token ids, each with its begin and end."""

    id: str
    image: Tensor
    captions: list[list[int]]
    references: list[str] = field(default_factory=list)


@dataclass
class BadSample:
    """A sample that could not be read, and why."""

    id: str
    reason: str


@dataclass
class CaptionBatch:
    """Images with their captions.

    Shapes:
        images uint8 (B, 3, H, W), or the features kept of them, floating (B, S, C)
        tokens (B, L), segments (B, L): 0 is padding, captions count from 1; targets of (B, L)
    """

    images: Tensor
    tokens: Tensor
    segments: Tensor
    targets: Targets
    ids: list[str]
    references: list[list[str]]
    bad: list[BadSample]

    def pin_memory(self) -> "CaptionBatch":
        self.images, self.tokens, self.segments = (x.pin_memory() for x in (self.images, self.tokens, self.segments))
        self.targets = self.targets.pin_memory()
        return self


def pack(rows: Sequence[Sequence[Sequence[int]]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Lays the token sequences of each row end to end.

    Shapes:
        rows: B lists of sequences of ids -> tokens (B, L), segments (B, L), L the longest row's total length
    """
    length = max((sum(map(len, row)) for row in rows), default=0)
    tokens = torch.full((len(rows), length), pad_id)
    segments = torch.full((len(rows), length), PADDING)
    for index, row in enumerate(rows):
        ids = [token for sequence in row for token in sequence]
        owners = [number for number, sequence in enumerate(row, start=1) for _ in sequence]
        tokens[index, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        segments[index, : len(ids)] = torch.tensor(owners, dtype=torch.long)
    return tokens, segments


def collate(samples: Sequence[Sample | BadSample], *, pad_id: int, image_size: int) -> CaptionBatch:
    """Packs the samples that could be read; the others are named in `bad`."""
    good = [sample for sample in samples if isinstance(sample, Sample)]
    tokens, segments = pack([sample.captions for sample in good], pad_id)
    empty = torch.empty(0, 3, image_size, image_size, dtype=torch.uint8)
    return CaptionBatch(
        images=torch.stack([sample.image for sample in good]) if good else empty,
        tokens=tokens,
        segments=segments,
        targets=Targets.of(next_token_labels(tokens, segments)),
        ids=[sample.id for sample in good],
        references=[sample.references for sample in good],
        bad=[sample for sample in samples if isinstance(sample, BadSample)],
    )
