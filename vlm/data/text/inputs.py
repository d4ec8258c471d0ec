"""Texts, pairs of texts or words for an encoder, and the fields that read them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch

from vlm.data.batch import IGNORE, CaptionRow, InputRows, MaskedRows, WordTags, pack
from vlm.data.fields import AugmentKey, CaptionField, Field, TokenField
from vlm.data.records import Record, Source, Split
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import Range, Share, UserError
from vlm.randomness import key as hashed
from vlm.randomness import numpy_rng

Pieces = Callable[[str], list[int]]
# The number of rows that hold several texts, and their length, are rounded up to multiples of these. A CPU generates
# code for each new shape of a product in milliseconds, which is as long as the products of short texts take.
ROWS, LENGTH = 2, 8
MAX_SHARED_LENGTH = 64  # maximum length of a row that is longer than its longest text
NO_BREAK = "\u00a0"
KEYS = 512  # attention to this many tokens costs about as much as everything else per token


class Input(NamedTuple):
    """A row of token ids, their types, and the indices of those that a head reads."""

    ids: Sequence[int]
    types: Sequence[int]
    places: Sequence[int] = ()


class EncodedSample(NamedTuple):
    """The rows of a sample, and its texts or words if requested."""

    rows: Sequence[Input]
    texts: Sequence[str] = ()


def encode_text(tokenizer: Tokenizer, max_len: int, text: str, pair: str | None = None) -> Input:
    """Encodes a text with its begin and end, or a pair as begin, text, end, second text, end (Devlin et al. 2019).

    Long texts are truncated, in a pair the longer one.
    """
    ids = tokenizer.encode(text)
    begin, end = tokenizer.read_begin, [tokenizer.eos_id]
    if pair is None:
        row = [*begin, *ids[: max_len - len(begin) - 1], *end]
        return Input(row, [0] * len(row))
    pair_ids, room = tokenizer.encode(pair), max(0, max_len - len(begin) - 2)
    count = min(len(ids), max(room - len(pair_ids), (room + 1) // 2))
    first, second = [*begin, *ids[:count], *end], [*pair_ids[: room - count], *end]
    return Input(first + second, [0] * len(first) + [1] * len(second))


def encode_words(tokenizer: Tokenizer, max_len: int, words: Sequence[str], pieces: Pieces | None = None) -> list[Input]:
    """Encodes words with begin and end, with the index of each word's first token; splits them into rows if needed.

    Each word is encoded with a leading space, so that its tokens do not depend on its position. Spaces inside a word,
    as between the syllables of Vietnamese, become no-break spaces, so that only words begin with a space.

    Args:
        pieces: A cached function from words to ids.
    """
    rows: list[tuple[list[int], list[int]]] = [([tokenizer.bos_id], [])]
    for word in words:
        ids = (pieces or tokenizer.encode)(mark_word(word))[: max_len - 2]
        if len(rows[-1][0]) + len(ids) + 1 > max_len:
            rows.append(([tokenizer.bos_id], []))
        row, places = rows[-1]
        places.append(len(row))
        row += ids
    return [Input([*row, tokenizer.eos_id], [0] * (len(row) + 1), places) for row, places in rows]


def mark_word(word: str) -> str:
    """Returns a word as a tagger reads it: after a space, and with no other."""
    return f" {word.replace(' ', NO_BREAK)}"


def _pack_texts(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Packs texts into rows of a length, longest first, each into the first row with room (Johnson 1973).

    Texts and rows are sorted by index; each text gets its own row if packing does not reduce the number of rows.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        row = next((row for row, space in enumerate(free) if space >= lengths[number]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(room)
        rows[row].append(number)
        free[row] -= lengths[number]
    count = _round_up(len(rows), ROWS)
    if count >= len(lengths):
        return [[number] for number in range(len(lengths))]
    return [*sorted(map(sorted, rows)), *[[] for _ in range(count - len(rows))]]


def _round_up(number: int, multiple: int) -> int:
    return number + -number % multiple


def input_rows(samples: Sequence[EncodedSample], pad_id: int) -> InputRows:
    """Packs the texts of some samples into rows, padded to about the longest text."""
    texts = [row for sample in samples for row in sample.rows]
    lengths = [len(text.ids) for text in texts]
    longest = _round_up(max(lengths, default=0), LENGTH)
    rooms = (longest, *range(longest + LENGTH, MAX_SHARED_LENGTH + 1, LENGTH))
    layouts = ((_pack_texts(lengths, room), room) for room in rooms)
    rows, length = min(layouts, key=lambda layout: len(layout[0]) * layout[1] * (KEYS + layout[1]))  # the cheapest
    tokens, segments = pack([[texts[number].ids for number in row] for row in rows], pad_id, length)
    types = None
    if any(any(text.types) for text in texts):
        types, _ = pack([[texts[number].types for number in row] for row in rows], 0, length)
    begins = [0] * len(texts)
    for at, row in enumerate(rows):
        for number, before in zip(row, accumulate((lengths[number] for number in row), initial=0), strict=False):
            begins[number] = at * length + before
    layout = None
    if len(rows) < len(texts):
        span = torch.arange(longest)
        layout = (span + torch.tensor(begins)[:, None]).masked_fill(span >= torch.tensor(lengths)[:, None], -1)
    counts = [sum(len(text.places) for text in sample.rows) for sample in samples]
    places = [begin + place for begin, text in zip(begins, texts, strict=True) for place in text.places]
    positions = torch.tensor(places, dtype=torch.long) if any(counts) or not texts else None
    return InputRows(tokens, segments, types, positions, counts, [sample.texts for sample in samples], layout)


CACHE_SIZE = 2**16  # size of the cache of encoded words


class EncodedField(TokenField):
    """Base of text fields for encoders.

    Args:
        others: See TokenField.
    Shapes:
        InputRows of tokens (B, L), segments (B, L)
    """

    cuts = False  # whether texts that are longer than a row are truncated

    def state(self) -> dict[str, Any]:
        return super().state() | {"max_len": self.max_len}

    def pieces(self, word: str) -> list[int]:
        """Token ids of a word, cached."""
        if word not in self._ids:
            if len(self._ids) >= CACHE_SIZE:
                self._ids.clear()
            self._ids[word] = self.tokenizer.encode(word)
        return self._ids[word]

    def collate(self, values: Sequence[EncodedSample]) -> InputRows:
        return input_rows(values, self.tokenizer.pad_id)

    def length(self, record: Record) -> int:
        return sum(len(row.ids) for row in self.encode(record, ()).rows)


class InputField(EncodedField):
    """The text of a record, or its pair of texts; long texts are truncated."""

    needs = ("text",)
    cuts = True
    pairs = False

    def prepare(self) -> None:
        self.pairs = "pair" in self._train.record(0)

    def state(self) -> dict[str, Any]:
        return super().state() | {"pairs": self.pairs}

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.pairs = bool(about["pairs"])

    def texts_of(self, record: Record) -> Sequence[str]:
        return [record[name] for name in ("text", "pair") if name in record]

    def encode(self, record: Record, key: AugmentKey | None) -> EncodedSample:
        texts = self.texts_of(record)
        return EncodedSample([encode_text(self.tokenizer, self.max_len, *texts)], texts if key is None else ())


class WordsField(EncodedField):
    """The words of a record and the index of each word's first token; long records are split into rows."""

    needs = ("words",)

    def texts_of(self, record: Record) -> Sequence[str]:
        return ["".join(map(mark_word, record["words"]))]

    def encode(self, record: Record, key: AugmentKey | None) -> EncodedSample:
        words = record["words"]
        return EncodedSample(
            encode_words(self.tokenizer, self.max_len, words, self.pieces), words if key is None else ()
        )


class TagField(Field):
    """The tags of a record's words, as WordTags; tags that training does not have get no label."""

    needs = ("tags",)
    classes: Sequence[str] = ()

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        self.splits = splits

    def prepare(self) -> None:
        self._take(sorted({tag for record in self.splits["train"].records() for tag in record["tags"]}))

    def _take(self, classes: Iterable[str]) -> None:
        self.classes = list(classes)
        self._labels = {tag: label for label, tag in enumerate(self.classes)}

    def state(self) -> dict[str, Any]:
        return {"classes": self.classes}

    def restore(self, about: Mapping[str, Any]) -> None:
        """Restores the tags of a checkpoint.

        Raises:
            UserError: None of them occurs in the data.
        """
        self._take(about["classes"])
        first = self.splits[next(iter(self.splits))].record(0)["tags"]
        if not set(first) & set(self.classes):
            raise UserError(f"data: the checkpoint has no tag {first[0]!r}, only {', '.join(self.classes[:8])}")

    @property
    def sizes(self) -> dict[str, int]:
        return {"num_classes": len(self.classes)}

    def identity(self, record: Record) -> Sequence[str]:
        return record["tags"]

    def encode(self, record: Record, key: AugmentKey | None) -> Sequence[str]:
        return record["tags"]

    def collate(self, values: Sequence[Sequence[str]]) -> WordTags:
        labels = [self._labels.get(tag, IGNORE) for tags in values for tag in tags]
        labelled = sum(label != IGNORE for label in labels)
        return WordTags(torch.tensor(labels, dtype=torch.long), labelled, values)


class TargetField(CaptionField):
    """The translation of a record as a row of tokens; in evaluation also as its reference."""

    needs = ("translation",)
    paired = False

    def texts_of(self, record: Record) -> Sequence[str]:
        return [record["translation"]]

    references_of = texts_of


class OneCaptionField(CaptionField):
    """One caption of each record, drawn by (seed, epoch, id).

    In evaluation, all captions of a record and then the same with shuffled words: a control that shows what a bag of
    words achieves.

    Args:
        others: See CaptionField.
    Shapes:
        InputRows of tokens (B, L), segments (B, L), places (T,): index of each caption's first token
    """

    paired = False
    open = TokenField.open  # an encoder does not distinguish languages

    def encode(self, record: Record, key: AugmentKey | None) -> CaptionRow:
        if key is None:
            captions = list(self.references_of(record))
            bags = []  # the captions with shuffled words
            for number, caption in enumerate(captions):
                words = caption.split()
                order = numpy_rng("disordered", record.id, number).permutation(len(words))
                bags.append(" ".join(words[place] for place in order))
            return CaptionRow([self.encode_caption(caption) for caption in [*captions, *bags]], captions)
        captions, (seed, epoch, _, *copy) = list(self.texts_of(record)), key
        return CaptionRow(
            [self.encode_caption(captions[hashed("caption", seed, epoch, record.id, *copy) % len(captions)])]
        )

    def collate(self, values: Sequence[CaptionRow]) -> InputRows:  # type: ignore[override]
        rows = ([Input(ids, [0] * len(ids), [0]) for ids in value.texts] for value in values)
        samples = [EncodedSample(row, value.references) for row, value in zip(rows, values, strict=True)]
        return input_rows(samples, self.tokenizer.pad_id)

    def length(self, record: Record) -> int:
        """Mean length of the captions, because one of them is read."""
        captions = self.texts_of(record)
        return round(sum(len(self.encode_caption(caption)) for caption in captions) / len(captions))


class DescriptionField(EncodedField):
    """One caption of each record, as the text that a picture is drawn from; long captions are truncated.

    In training it is drawn by (seed, epoch, index), and a share of the samples has an empty text instead, so that the
    model also learns pictures without a text (Ho and Salimans 2022). In evaluation it is drawn by the record's id, and
    all captions of the record follow it.

    Args:
        dropped: Share of the training samples with an empty text.
        others: See EncodedField.
    """

    needs = ("captions",)
    cuts = True

    def __init__(self, *, tokenizer: Tokenizer, max_len: Annotated[int, Range(3)], dropped: Share = 0.1) -> None:
        super().__init__(tokenizer=tokenizer, max_len=max_len)
        self.dropped = dropped

    def texts_of(self, record: Record) -> Sequence[str]:
        return record["captions"]

    def encode(self, record: Record, key: AugmentKey | None) -> EncodedSample:
        captions = list(self.texts_of(record) if key is not None else record["references"])
        draw, omit = numpy_rng("description", *((record.id,) if key is None else key)).random(2).tolist()
        caption = captions[int(draw * len(captions))]
        if key is None:
            return EncodedSample([encode_text(self.tokenizer, self.max_len, caption)], [caption, *captions])
        text = "" if omit < self.dropped else caption
        return EncodedSample([encode_text(self.tokenizer, self.max_len, text)])

    def length(self, record: Record) -> int:
        """Mean length of the captions, because one of them is read."""
        lengths = [len(encode_text(self.tokenizer, self.max_len, text).ids) for text in self.texts_of(record)]
        return round(sum(lengths) / len(lengths))


MASKED, RANDOM = 0.8, 0.1  # shares of the chosen tokens; the rest is unchanged (Devlin et al. 2019, section 3.1)


class MaskedText(NamedTuple):
    """The rows of a sample with the indices of chosen tokens; the original tokens; and the indices of masked words."""

    rows: Sequence[Input]
    labels: Sequence[int]
    texts: Sequence[str] = ()
    gaps: Sequence[int] = ()


class MaskedField(EncodedField):
    """A text with a share of its tokens or words masked (Devlin et al. 2019).

    In training they are drawn by (seed, epoch, index), as is the part of a text that is longer than a row. In
    evaluation they are drawn by the sample's id and all masked, and a long text is split into rows.

    Args:
        tokenizer: See EncodedField; needs a mask id.
        max_len: See EncodedField.
        share: Share of tokens or words to choose; at least one is chosen.
        whole_words: Whether to choose whole words (separated by white space) instead of tokens.
    """

    needs = ("text",)

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        max_len: Annotated[int, Range(3)],
        share: Share = 0.15,
        whole_words: bool = False,
    ) -> None:
        super().__init__(tokenizer=tokenizer, max_len=max_len)
        self.share, self.whole_words = share, whole_words

    def prepare(self) -> None:
        self._learn_words()

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self._learn_words()

    def _learn_words(self) -> None:
        """Finds tokens that begin or end with white space, or consist of it.

        Raises:
            UserError: The tokenizer has no mask id.
        """
        if (mask_id := self.tokenizer.mask_id) is None:
            raise UserError("tokenizer.mask: is false, but this task needs a mask token; set it to true")
        self._mask_id = mask_id
        texts = [self.tokenizer.decode([id]) for id in range(self.tokenizer.vocab_size)]
        self._begins = np.array([text[:1].isspace() for text in texts])
        self._ends = np.array([text[-1:].isspace() for text in texts])
        self._blank = np.array([text.isspace() for text in texts])
        self._usual = np.array([id for id, text in enumerate(texts) if text])  # without special ids

    def texts_of(self, record: Record) -> Sequence[str]:
        return [record["text"]]

    def encode(self, record: Record, key: AugmentKey | None) -> MaskedText:
        ids, room = np.array(self.tokenizer.encode(record["text"]), dtype=np.int64), self.max_len - 2
        rng = numpy_rng("mask", *((record.id,) if key is None else key))
        if key is not None and len(ids) > room:
            start = rng.integers(len(ids) - room + 1)
            ids = ids[start : start + room]
        words = self._word_numbers(ids)
        units = words if self.whole_words else np.arange(len(ids))
        count = int(units[-1]) + 1 if len(units) else 0
        gaps = np.sort(rng.permutation(count)[: max(1, round(self.share * count))])
        chosen = np.flatnonzero(np.isin(units, gaps))
        visible = ids.copy()
        visible[chosen] = self._mask_id if key is None else self._hidden(ids[chosen], rng)
        rows = [self._row(visible, chosen, start, room) for start in range(0, max(1, len(ids)), room)]
        if key is not None:
            return MaskedText(rows, ids[chosen].tolist())
        return MaskedText(rows, ids[chosen].tolist(), [record["text"]], sorted({*words[chosen].tolist()}))

    def _word_numbers(self, ids: np.ndarray) -> np.ndarray:
        """Index of each token's word; a word begins with the white space before it."""
        starts = np.zeros(len(ids), dtype=bool)
        starts[1:] = (self._begins[ids[1:]] | self._ends[ids[:-1]]) & ~self._blank[ids[:-1]]
        return np.cumsum(starts)

    def _hidden(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Training inputs for the chosen tokens: mostly masks, else random or unchanged tokens."""
        which, random_ids = rng.random(len(ids)), self._usual[rng.integers(len(self._usual), size=len(ids))]
        rest = np.where(which < MASKED + RANDOM, random_ids, ids)
        return np.where(which < MASKED, self._mask_id, rest)

    def _row(self, ids: np.ndarray, chosen: np.ndarray, start: int, room: int) -> Input:
        part = ids[start : start + room].tolist()
        places = [int(at) - start + 1 for at in chosen if start <= at < start + room]
        return Input([self.tokenizer.bos_id, *part, self.tokenizer.eos_id], [0] * (len(part) + 2), places)

    def collate(self, values: Sequence[MaskedText]) -> MaskedRows:  # type: ignore[override]
        rows = input_rows([EncodedSample(value.rows, value.texts) for value in values], self.tokenizer.pad_id)
        labels = torch.tensor([id for value in values for id in value.labels], dtype=torch.long)
        return MaskedRows(**vars(rows), labels=labels, gaps=[value.gaps for value in values])
