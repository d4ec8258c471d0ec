"""Texts as ids that an encoder reads: a text, a pair of texts, or words one by one."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from vlm.data.batch import InputRows, pack
from vlm.data.text.tokenizer import Tokenizer

Pieces = Callable[[str], list[int]]


class Input(NamedTuple):
    """A row of ids, the type of each, and the places of those that a head reads."""

    ids: Sequence[int]
    types: Sequence[int]
    places: Sequence[int] = ()


class Encoded(NamedTuple):
    """The rows of a sample, and its texts or words themselves where they are asked for."""

    rows: Sequence[Input]
    texts: Sequence[str] = ()


def encode_text(tokenizer: Tokenizer, max_len: int, text: str, pair: str | None = None) -> Input:
    """A text between begin and end, or a pair as begin, text, end, second text, end (Devlin et al. 2019).

    Of what is too long the end is cut, of a pair that of the longer text.
    """
    ids = tokenizer.encode(text)
    begin, end = [tokenizer.bos_id], [tokenizer.eos_id]
    if pair is None:
        row = [*begin, *ids[: max_len - 2], *end]
        return Input(row, [0] * len(row))
    other, room = tokenizer.encode(pair), max(0, max_len - 3)
    kept = min(len(ids), max(room - len(other), (room + 1) // 2))
    first, second = [*begin, *ids[:kept], *end], [*other[: room - kept], *end]
    return Input(first + second, [0] * len(first) + [1] * len(second))


def encode_words(tokenizer: Tokenizer, max_len: int, words: Sequence[str], pieces: Pieces | None = None) -> list[Input]:
    """Words between begin and end, the first piece of each for a head; in several rows where one is too short.

    Each word is encoded after a space, so that it has the same pieces wherever it stands.

    Args:
        pieces: Ids of a word, where they are remembered.
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


def input_rows(samples: Sequence[Encoded], pad_id: int) -> InputRows:
    """The rows of some samples, padded to the longest."""
    rows = [row for sample in samples for row in sample.rows]
    tokens, segments = pack([[row.ids] for row in rows], pad_id)
    length = tokens.shape[1]
    types = None
    if any(1 in row.types for row in rows):
        types = torch.tensor([[*row.types, *[0] * (length - len(row.types))] for row in rows])
    counts = [sum(len(row.places) for row in sample.rows) for sample in samples]
    places = [number * length + place for number, row in enumerate(rows) for place in row.places]
    positions = torch.tensor(places, dtype=torch.long) if any(counts) else None
    return InputRows(tokens, segments, types, positions, counts, [sample.texts for sample in samples])
