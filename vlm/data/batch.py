"""Batches: the values of a task's fields for some samples, and rows that hold several texts end to end."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from vlm.models.frozen_features import Features

PADDING = 0  # the segment of padding; the texts of a row are segments 1, 2, ...
IGNORE = -100  # the label of a position that has nothing to predict


class BadSample(NamedTuple):
    """A sample that could not be read, and why."""

    id: str
    reason: str


class Tensors:
    """A dataclass of tensors among other values, moved to a device and into pinned memory together."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._each(lambda tensor: tensor.to(*args, **kwargs))

    def pin_memory(self) -> Self:
        return self._each(Tensor.pin_memory)

    def _each(self, change: Any) -> Self:
        values = {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]
        tensors = {name: change(value) for name, value in values.items() if isinstance(value, Tensor | Tensors)}
        return replace(self, **tensors)  # type: ignore[type-var]


@dataclass
class Batch:
    """Samples as a task reads them.

    Args:
        ids: Names of the samples that could be read.
        values: By field, the values of these samples together.
        bad: The others.
    """

    ids: list[str]
    values: Mapping[str, Any]
    bad: list[BadSample]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def to(self, *args: Any, **kwargs: Any) -> "Batch":
        moved = {name: value.to(*args, **kwargs) if _moves(value) else value for name, value in self.values.items()}
        return replace(self, values=moved)

    def pin_memory(self) -> "Batch":
        pinned = {name: value.pin_memory() if _moves(value) else value for name, value in self.values.items()}
        return replace(self, values=pinned)


def _moves(value: Any) -> bool:
    return isinstance(value, Tensor | Tensors | Features)


def next_token_labels(tokens: Tensor, segments: Tensor | None) -> Tensor:
    """The token that each position has to predict: the next one of its own segment.

    The only place where labels shift. A language model's window has one token more than its inputs: `window_targets`
    drops the last label, and its task the last token.

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


@dataclass
class Targets(Tensors):
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


@dataclass
class TextRows(Tensors):
    """Rows of tokens.

    Args:
        segments: Tell the texts of a row apart, which count from 1; 0 is padding. None where each row is one text.
        targets: Of next-token prediction.
        scored: Tokens that count when they are predicted; None for all.
        bounds: Where each text begins in the rows end to end, each row without its last token, which is only predicted,
            and their end; None where they are not known.
        references: Texts or questions that belong to each row, for metrics; none in training.
        languages: Language of each of these texts, where records say them.
        ids: Names of the samples, in evaluation.
        places: Index of each row's sample in its split, in evaluation.
        others: The rows of each sample's partner (vlm.data.pairs), in evaluation.
    Shapes:
        tokens (B, L), segments (B, L) or None, scored bool (B, L) or None, bounds int32 (N + 1,) or None
    """

    tokens: Tensor
    segments: Tensor | None
    targets: Targets
    scored: Tensor | None = None
    bounds: Tensor | None = None
    references: Sequence[Sequence[Any]] = ()
    languages: Sequence[Sequence[str]] = ()
    ids: Sequence[str] = ()
    places: list[int] = field(default_factory=list)
    others: "TextRows | None" = None

    def references_in(self, language: str | None) -> Sequence[Sequence[Any]]:
        """The texts of each row in one language; None for all."""
        if language is None:
            return self.references
        rows = zip(self.references, self.languages, strict=True)
        return [[text for text, own in zip(*row, strict=True) if own == language] for row in rows]


@dataclass
class KeptImages(Tensors):
    """Images that lie on the device already.

    Shapes:
        index (B,): their places there; numbers (B, NUMBERS): of their augmentation, as in vlm.data.images.batched
    """

    index: Tensor
    numbers: Tensor


def text_bounds(segments: Tensor) -> Tensor:
    """Cumulative lengths of the texts of rows laid end to end, as kernels take them: segments (B, L) -> int32 (N + 1,).

    A text is a run of one segment in a row; padding is one too.
    """
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    places = begins.flatten().nonzero()[:, 0]
    return torch.cat([places, places.new_full((1,), segments.numel())]).int()


@dataclass
class InputRows(Tensors):
    """Texts as an encoder reads them, and the tokens of them that a head reads.

    Args:
        segments: Tell the texts of a row apart, which count from 1; 0 is padding.
        types: 0 of a text, 1 of the second text of a pair; None where no text is a pair.
        places: Index of each token that a head reads, in the rows end to end; None where it reads whole texts.
        counts: Number of such tokens of each sample.
        texts: The text or texts of each sample, or its words; none in training.
        layout: Index of each text's tokens in the rows end to end, -1 beyond its end; None where each row is one text.
    Shapes:
        tokens (B, L), segments (B, L), types (B, L) or None, places (T,) or None, layout (N, S) or None
    """

    tokens: Tensor
    segments: Tensor
    types: Tensor | None = None
    places: Tensor | None = None
    counts: Sequence[int] = ()
    texts: Sequence[Sequence[str]] = ()
    layout: Tensor | None = None

    def ids(self) -> list[list[int]]:
        """The tokens of each text."""
        tokens, segments = self.tokens.cpu(), self.segments.cpu()
        if self.layout is None:
            return [row[own != PADDING].tolist() for row, own in zip(tokens, segments, strict=True)]
        return [tokens.flatten()[at[at >= 0]].tolist() for at in self.layout.cpu()]


@dataclass(kw_only=True)
class SpanRows(InputRows):
    """Questions with their passages, in windows, whose answers are parts of the passages.

    Its places are those of each window's first token and of the first piece of each word of the passage.

    Args:
        ends: Tokens where the answer of each window starts and ends; the first token of one without an answer.
        firsts: By sample, the number in its passage of each window's first word.
    Shapes:
        ends (B, 2)
    """

    ends: Tensor
    firsts: Sequence[Sequence[int]]


@dataclass(kw_only=True)
class MaskedRows(InputRows):
    """Texts of which some tokens are masked; its places are those of these tokens.

    Args:
        labels: The tokens that stood there.
        gaps: By sample, the numbers of its words that are masked; none in training.
    Shapes:
        labels (T,)
    """

    labels: Tensor
    gaps: Sequence[Sequence[int]] = ()


@dataclass
class WordTags(Tensors):
    """The tags of the words of a batch.

    Args:
        labels: Of all words; IGNORE of a tag that training lacks.
        count: Number of words with a label.
        tags: The tags of each sample's words.
    Shapes:
        labels (T,)
    """

    labels: Tensor
    count: int
    tags: Sequence[Sequence[str]]


def pack(rows: Sequence[Sequence[Sequence[int]]], pad_id: int, length: int = 0) -> tuple[Tensor, Tensor]:
    """Lays the token sequences of each row end to end.

    Args:
        length: The least L.
    Shapes:
        rows: B lists of sequences of ids -> tokens (B, L), segments (B, L), L the longest row's total length
    """
    length = max([length, *(sum(map(len, row)) for row in rows)])
    tokens = torch.full((len(rows), length), pad_id)
    segments = torch.full((len(rows), length), PADDING)
    for index, row in enumerate(rows):
        ids = [token for sequence in row for token in sequence]
        owners = [number for number, sequence in enumerate(row, start=1) for _ in sequence]
        tokens[index, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        segments[index, : len(ids)] = torch.tensor(owners, dtype=torch.long)
    return tokens, segments


class CaptionRow(NamedTuple):
    """The texts of a sample, encoded; in evaluation with more.

    Args:
        texts: Each as its field encodes it.
        references: Texts or questions for metrics.
        languages: Language of each of these, where the record says them.
        id: Name of the sample.
        place: Index of the sample in its split.
        other: The partner's.
    """

    texts: list[Any]
    references: Sequence[Any] = ()
    languages: Sequence[str] = ()
    id: str = ""
    place: int | None = None
    other: "CaptionRow | None" = None


def paired_rows(values: Sequence[CaptionRow], rows_of: Callable[[Sequence[Sequence[Any]]], TextRows]) -> TextRows:
    """The texts of samples as rows of tokens, beside those of their partners where these are there.

    Args:
        rows_of: Lays the encoded texts of samples out as rows.
    """
    others = [row.other for row in values if row.other is not None]
    return replace(
        rows_of([row.texts for row in values]),
        references=[row.references for row in values],
        languages=[row.languages for row in values],
        ids=[row.id for row in values],
        places=[row.place for row in values if row.place is not None],
        others=paired_rows(others, rows_of) if others else None,
    )


def next_token_rows(ids: Sequence[Sequence[Sequence[int]]], pad_id: int, only_read: Sequence[int] = ()) -> TextRows:
    """Rows of token ids, of which each predicts the next.

    Args:
        only_read: Ids that are not predicted.
    """
    tokens, segments = pack(ids, pad_id)
    scored = ~torch.isin(tokens, torch.tensor(only_read)) if only_read else None
    predicted = tokens if scored is None else tokens.masked_fill(~scored, IGNORE)
    return TextRows(tokens, segments, Targets.of(next_token_labels(predicted, segments)), scored)
