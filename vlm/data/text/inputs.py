"""Encodes texts, pairs of texts or words for an encoder."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from vlm.data.batch import InputRows, pack
from vlm.data.text.tokenizer import Tokenizer

Pieces = Callable[[str], list[int]]
# The number of rows that hold several texts, and their length, are rounded up to multiples of these. A CPU generates
# code for each new shape of a product in milliseconds, which is as long as the products of short texts take.
ROWS, LENGTH = 2, 8
ROOM = 64  # maximum length of a row that is longer than its longest text
KEYS = 512  # attention to this many tokens costs about as much as everything else per token


class Input(NamedTuple):
    """A row of token ids, their types, and the indices of those that a head reads."""

    ids: Sequence[int]
    types: Sequence[int]
    places: Sequence[int] = ()


class Encoded(NamedTuple):
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
    other, room = tokenizer.encode(pair), max(0, max_len - len(begin) - 2)
    kept = min(len(ids), max(room - len(other), (room + 1) // 2))
    first, second = [*begin, *ids[:kept], *end], [*other[: room - kept], *end]
    return Input(first + second, [0] * len(first) + [1] * len(second))


def encode_words(tokenizer: Tokenizer, max_len: int, words: Sequence[str], pieces: Pieces | None = None) -> list[Input]:
    """Encodes words with begin and end, with the index of each word's first token; splits them into rows if needed.

    Each word is encoded with a leading space, so that its tokens do not depend on its position.

    Args:
        pieces: A cached function from words to ids.
    """
    rows: list[tuple[list[int], list[int]]] = [([tokenizer.bos_id], [])]
    for word in words:
        ids = (pieces or tokenizer.encode)(f" {word}")[: max_len - 2]
        if len(rows[-1][0]) + len(ids) + 1 > max_len:
            rows.append(([tokenizer.bos_id], []))
        row, places = rows[-1]
        places.append(len(row))
        row += ids
    return [Input([*row, tokenizer.eos_id], [0] * (len(row) + 1), places) for row, places in rows]


def shared_rows(lengths: Sequence[int]) -> tuple[list[list[int]], int]:
    """Assigns texts, by index, to shared rows; returns the rows and their length, chosen for the lowest cost."""
    longest = _up(max(lengths, default=0), LENGTH)
    rooms = (longest, *range(longest + LENGTH, ROOM + 1, LENGTH))
    layouts = ((_fitted(lengths, room), room) for room in rooms)
    return min(layouts, key=lambda layout: len(layout[0]) * layout[1] * (KEYS + layout[1]))


def _fitted(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Packs texts into rows of a length, longest first, each into the first row with room (Johnson 1973).

    Texts and rows are sorted by index; each text gets its own row if packing does not reduce the number of rows.
    """
    rows: list[list[int]] = []
    left: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        row = next((row for row, free in enumerate(left) if free >= lengths[number]), len(rows))
        if row == len(rows):
            rows.append([])
            left.append(room)
        rows[row].append(number)
        left[row] -= lengths[number]
    count = _up(len(rows), ROWS)
    if count >= len(lengths):
        return [[number] for number in range(len(lengths))]
    return [*sorted(map(sorted, rows)), *[[] for _ in range(count - len(rows))]]


def _up(number: int, multiple: int) -> int:
    return number + -number % multiple


def input_rows(samples: Sequence[Encoded], pad_id: int) -> InputRows:
    """Packs the texts of some samples into rows, padded to about the longest text."""
    texts = [row for sample in samples for row in sample.rows]
    lengths = [len(text.ids) for text in texts]
    rows, length = shared_rows(lengths)
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
        span = torch.arange(_up(max(lengths), LENGTH))
        layout = (span + torch.tensor(begins)[:, None]).masked_fill(span >= torch.tensor(lengths)[:, None], -1)
    counts = [sum(len(text.places) for text in sample.rows) for sample in samples]
    places = [begin + place for begin, text in zip(begins, texts, strict=True) for place in text.places]
    positions = torch.tensor(places, dtype=torch.long) if any(counts) or not texts else None
    return InputRows(tokens, segments, types, positions, counts, [sample.texts for sample in samples], layout)
