"""Batches: collated values of a task's fields, and rows of packed texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from vlm.models.context import PLACE, Features
from vlm.randomness import numpy_rng

PADDING = 0  # segment of padding; the texts of a row are segments 1, 2, ...
IGNORE = -100  # label of a position without a target


class BadSample(NamedTuple):
    """A sample that could not be read, and the reason."""

    id: str
    reason: str


class Tensors:
    """Base of dataclasses with tensors, which can be moved to a device and pinned."""

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self._map_tensors(lambda tensor: tensor.to(*args, **kwargs))

    def pin_memory(self) -> Self:
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def _map_tensors(self, change: Callable[[Any], Any]) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        tensors = {name: change(value) for name, value in values.items() if isinstance(value, Tensor | Tensors)}
        return replace(self, **tensors)  # type: ignore[type-var]


@dataclass
class Batch:
    """A collated batch.

    Args:
        ids: Ids of the samples.
        values: Collated values by field.
        bad: Samples that could not be read, which are left out.
    """

    ids: list[str]
    values: Mapping[str, Any]
    bad: list[BadSample]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def to(self, *args: Any, **kwargs: Any) -> "Batch":
        return self._map_tensors(lambda value: value.to(*args, **kwargs))

    def pin_memory(self) -> "Batch":
        return self._map_tensors(lambda value: value.pin_memory())

    def _map_tensors(self, change: Callable[[Any], Any]) -> "Batch":
        movable = Tensor | Tensors | Features
        changed = {name: change(value) if isinstance(value, movable) else value for name, value in self.values.items()}
        return replace(self, values=changed)


def next_token_labels(tokens: Tensor, segments: Tensor | None) -> Tensor:
    """Labels for next-token prediction: each position predicts the next token of its own segment.

    Labels are shifted here only. A language model's window has one token more than the model reads: `window_targets`
    drops its last label, and the task its last token.

    Args:
        segments: None if each row is one segment.
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

    They are found in the data loader, because indexing by a bool mask on the device makes the host wait for the number
    of positions.

    Args:
        places: Index of each labelled position in the flattened rows; None if all are labelled.
    Shapes:
        labels (T,), places (T,) or None
    """

    labels: Tensor
    places: Tensor | None

    @classmethod
    def from_labels(cls, labels: Tensor) -> "Targets":
        """Targets of labels (B, L), which are IGNORE at positions without a target."""
        flat = labels.flatten()
        places = (flat != IGNORE).nonzero()[:, 0]
        # If all positions are labelled, as in windows of text, picking them would be a useless copy.
        return cls(flat, None) if len(places) == len(flat) else cls(flat[places], places)

    @property
    def count(self) -> int:
        """Number T of labelled positions."""
        return len(self.labels)

    def pick(self, hidden: Tensor) -> Tensor:
        """Selects the labelled positions: (B, L, D) -> (T, D)."""
        rows = hidden.flatten(0, 1)
        return rows if self.places is None else rows.index_select(0, self.places)


@dataclass
class AnswerPairs(Tensors):
    """Pairs of answers in rows of texts: of each pair, the text of the chosen answer and then that of the rejected one.

    Args:
        answers: Index of the text of each labelled position, among the texts of all rows: 2 n or 2 n + 1 for pair n.
        names: A name of each pair, unique in its split.
    Shapes:
        answers (T,)
    """

    answers: Tensor
    names: Sequence[str]

    @classmethod
    def from_rows(cls, rows: "TextRows", names: Sequence[Sequence[str]]) -> Self:
        """The pairs of rows that hold two texts per pair.

        Args:
            names: The names of each row's pairs.
        """
        assert rows.segments is not None
        first = torch.tensor([0, *(2 * len(row) for row in names)]).cumsum(0)[:-1]  # of each row's texts
        numbers = rows.segments + first[:, None] - 1
        places = slice(None) if rows.targets.places is None else rows.targets.places
        return cls(numbers.flatten()[places], [name for row in names for name in row])

    def sum_by_answer(self, values: Tensor) -> Tensor:
        """Sums values of labelled positions over each answer: (T,) -> (N, 2)."""
        return values.new_zeros(2 * len(self.names)).index_add(0, self.answers, values).view(-1, 2)


@dataclass
class TextRows(Tensors):
    """Rows of packed tokens.

    Args:
        segments: Number of the text in its row, from 1; 0 is padding. None if each row is one text.
        targets: Targets of next-token prediction.
        scored: Tokens that count as predictions; None for all.
        bounds: Start of each text in the flattened inputs, and their end; a row's last token is a target only. Known
            for windows of a language model, else None.
        references: Texts or questions of each row, for metrics; empty in training.
        languages: Language of each of these texts, if records have it.
        ids: Ids of the samples, in evaluation.
        indices: Index of each row's sample in its split, in evaluation.
        partners: Rows of each sample's partner (vlm.data.fields), in evaluation.
        image_states: See PromptRows; None for other rows.
        pairs: The pairs of answers that the texts are; None for other texts.
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
    indices: list[int] = field(default_factory=list)
    partners: "TextRows | None" = None
    image_states: Tensor | None = None
    pairs: AnswerPairs | None = None

    @property
    def has_image(self) -> Tensor | None:
        """Whether each row reads an image, bool (B,); None if all do."""
        return None if self.image_states is None else (self.tokens == PLACE).any(1)

    def references_in(self, language: str | None) -> Sequence[Sequence[Any]]:
        """The texts of each row in one language; None for all."""
        if language is None:
            return self.references
        rows = zip(self.references, self.languages, strict=True)
        return [[text for text, text_language in zip(*row, strict=True) if text_language == language] for row in rows]


@dataclass
class DeviceImages(Tensors):
    """References to images that are stored on the device.

    Shapes:
        index (B,): indices of the images
        numbers (B, NUM_PARAMS): augmentation parameters, see vlm.data.images.class_augment.encode_params
    """

    index: Tensor
    numbers: Tensor


@dataclass(kw_only=True)
class PromptRows(TextRows):
    """Rows of packed texts with the states of images inside them; tokens are PLACE for a state.

    Args:
        image_states: Index of the state at each PLACE, among the states of the batch's images in order; 0 elsewhere.
        num_states: Number of states of each row's images.
        prompts: In evaluation, token ids of each row's prompts, with PLACE for a state: one for captions, or one per
            question.
    Shapes:
        image_states (B, L)
    """

    image_states: Tensor
    num_states: Sequence[int]
    prompts: Sequence[Sequence[Sequence[int]]] = ()


def text_bounds(segments: Tensor) -> Tensor:
    """Cumulative lengths of the texts of flattened rows, for GPU kernels: segments (B, L) -> int32 (N + 1,).

    A text is a run of one segment in a row; padding counts as one.
    """
    is_begin = torch.ones_like(segments, dtype=torch.bool)
    is_begin[:, 1:] = segments[:, 1:] != segments[:, :-1]
    begins = is_begin.flatten().nonzero()[:, 0]
    return torch.cat([begins, begins.new_full((1,), segments.numel())]).int()


@dataclass
class InputRows(Tensors):
    """Packed texts for an encoder, and the tokens that a head reads.

    Args:
        segments: Number of the text in its row, from 1; 0 is padding.
        types: Token types: 0, or 1 in the second text of a pair; None if there are no pairs.
        places: Index of each token that a head reads, in the flattened rows; None if it reads entire texts.
        counts: Number of such tokens per sample.
        texts: The texts or words of each sample; empty in training.
        layout: Index of each text's tokens in the flattened rows, -1 after its end; None if each row is one text.
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
        """Token ids of each text."""
        tokens, segments = self.tokens.cpu(), self.segments.cpu()
        if self.layout is None:
            return [row[row_segments != PADDING].tolist() for row, row_segments in zip(tokens, segments, strict=True)]
        return [tokens.flatten()[at[at >= 0]].tolist() for at in self.layout.cpu()]


@dataclass(kw_only=True)
class SpanRows(InputRows):
    """Questions with windows of their passages; answers are spans of the passages.

    `places` holds each window's first token and the first token of each word of the passage.

    Args:
        ends: Start and end token of the answer in each window; the first token of a window without an answer.
        firsts: Per sample, the index of each window's first word in the passage.
    Shapes:
        ends (B, 2)
    """

    ends: Tensor
    firsts: Sequence[Sequence[int]]


@dataclass(kw_only=True)
class MaskedRows(InputRows):
    """Texts with masked tokens, whose indices are in `places`.

    Args:
        labels: The original tokens.
        gaps: Per sample, the indices of its masked words; empty in training.
    Shapes:
        labels (T,)
    """

    labels: Tensor
    gaps: Sequence[Sequence[int]] = ()


@dataclass
class WordTags(Tensors):
    """The tags of the words of a batch.

    Args:
        labels: Label of each word; IGNORE for tags that training does not have.
        count: Number of words with a label.
        tags: Tags of each sample's words.
    Shapes:
        labels (T,)
    """

    labels: Tensor
    count: int
    tags: Sequence[Sequence[str]]


def pack(rows: Sequence[Sequence[Sequence[int]]], pad_id: int, length: int = 0) -> tuple[Tensor, Tensor]:
    """Packs the token sequences of each row.

    Args:
        length: Minimum of L.
    Shapes:
        rows: B lists of sequences of ids -> tokens (B, L), segments (B, L), L the longest row's total length
    """
    length = max([length, *(sum(map(len, row)) for row in rows)])
    tokens = torch.full((len(rows), length), pad_id)
    segments = torch.full((len(rows), length), PADDING)
    for index, row in enumerate(rows):
        ids = [token for sequence in row for token in sequence]
        numbers = [number for number, sequence in enumerate(row, start=1) for _ in sequence]
        tokens[index, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        segments[index, : len(ids)] = torch.tensor(numbers, dtype=torch.long)
    return tokens, segments


def choose_for_row(lengths: Sequence[int], room: int, key: Sequence[int | str]) -> list[int]:
    """Indices of the first texts, in an order drawn from the key, that fit into a row together; at least one.

    Args:
        lengths: Number of tokens of each text.
        room: Number of tokens of a row.
    """
    order, chosen = numpy_rng("conversations", *key).permutation(len(lengths)).tolist(), list[int]()
    for at in order:
        if chosen and lengths[at] > room:
            break
        chosen.append(at)
        room -= lengths[at]
    return chosen


class CaptionRow(NamedTuple):
    """The encoded texts of a sample, and further values in evaluation.

    Args:
        texts: Texts, as encoded by the field.
        references: Texts or questions for metrics.
        languages: Language of each reference, if the record has it.
        id: Id of the sample.
        sample_index: Index of the sample in its split.
        partner: The same for the sample's partner.
    """

    texts: list[Any]
    references: Sequence[Any] = ()
    languages: Sequence[str] = ()
    id: str = ""
    sample_index: int | None = None
    partner: "CaptionRow | None" = None


def paired_rows(values: Sequence[CaptionRow], rows_of: Callable[[Sequence[Sequence[Any]]], TextRows]) -> TextRows:
    """Rows of the samples' texts, and rows of their partners if there are any.

    Args:
        rows_of: Packs encoded texts into rows.
    """
    partners = [row.partner for row in values if row.partner is not None]
    return replace(
        rows_of([row.texts for row in values]),
        references=[row.references for row in values],
        languages=[row.languages for row in values],
        ids=[row.id for row in values],
        indices=[row.sample_index for row in values if row.sample_index is not None],
        partners=paired_rows(partners, rows_of) if partners else None,
    )


def next_token_rows(ids: Sequence[Sequence[Sequence[int]]], pad_id: int, only_read: Sequence[int] = ()) -> TextRows:
    """Rows of token ids with targets for next-token prediction.

    Args:
        only_read: Ids that are inputs but not targets.
    """
    tokens, segments = pack(ids, pad_id)
    scored = ~torch.isin(tokens, torch.tensor(only_read)) if only_read else None
    predicted = tokens if scored is None else tokens.masked_fill(~scored, IGNORE)
    return TextRows(tokens, segments, Targets.from_labels(next_token_labels(predicted, segments)), scored)
