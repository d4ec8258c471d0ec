"""A question with a passage as rows that an encoder reads: the passage in windows, its words with their places."""

import re
import string
from collections.abc import Sequence
from typing import NamedTuple

from vlm.data.text.inputs import Input, Pieces
from vlm.data.text.tokenizer import Tokenizer

# Letters and digits together; any other sign, and each character of a script without spaces, by itself.
_ALONE = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORDS = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+|\S")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Place(NamedTuple):
    """A word's place in its text, in Unicode code points."""

    start: int
    stop: int


class Window(NamedTuple):
    """A row with a part of a passage.

    Args:
        row: The question and that part; its places are that of the first token, then that of each word's first piece.
        first: Number of the part's first word in the passage.
    """

    row: Input
    first: int


def word_places(text: str) -> list[Place]:
    """The words of a text; all signs but white space are in one."""
    return [Place(*match.span()) for match in _WORDS.finditer(text)]


def covering(words: Sequence[Place], start: int, stop: int) -> tuple[int, int] | None:
    """The first and the last word of a part of the text; None where it holds none."""
    inside = [number for number, word in enumerate(words) if word.start < stop and word.stop > start]
    return (inside[0], inside[-1]) if inside else None


def encode_passage(
    tokenizer: Tokenizer,
    max_len: int,
    stride: int,
    question: str,
    passage: str,
    *,
    words: Sequence[Place] | None = None,
    pieces: Pieces | None = None,
    marks_shared: bool = False,
) -> list[Window]:
    """A question and a passage as begin, question, end, part of the passage, end; as many rows as the passage needs.

    Windows overlap, so that whatever is asked for stands whole in one of them. Of a question that takes more than half
    of a row the end is cut.

    Args:
        stride: Tokens that each window moves on by, at least to the next word and at most to its own end.
        words: Words of the passage, where they are known.
        pieces: Ids of a word, where they are remembered.
        marks_shared: Whether words of the passage that the question has too, whatever their case, are of type 2, in
            place of 1 (the exact match of Chen et al. 2017, section 3.2).
    """
    words = word_places(passage) if words is None else words
    kinds = _shared(question, passage, words) if marks_shared else [1] * len(words)
    asked = tokenizer.encode(question)[: max_len // 2]
    head = [tokenizer.bos_id, *asked, tokenizer.eos_id]
    room = max_len - len(head) - 1
    ids = [_ids(passage, word, pieces or tokenizer.encode)[:room] for word in words]
    windows, start = [], 0
    while True:
        row, types, places, stop, after = list(head), [0] * len(head), [0], start, start + 1
        while stop < len(ids) and len(row) + len(ids[stop]) < max_len:
            places.append(len(row))
            row += ids[stop]
            types += [kinds[stop]] * len(ids[stop])
            stop += 1
            if len(row) - len(head) <= stride:
                after = max(after, stop)
        windows.append(Window(Input([*row, tokenizer.eos_id], [*types, 1], places), start))
        if stop >= len(ids):
            return windows
        start = after


def _shared(question: str, passage: str, words: Sequence[Place]) -> list[int]:
    """The type of each word of a passage: 2 where the question has it too, 1 of signs and all others."""
    asked = {question[slice(*word)].casefold() for word in word_places(question)}
    texts = (passage[slice(*word)].casefold() for word in words)
    return [2 if text in asked and text[0].isalnum() else 1 for text in texts]


def _ids(passage: str, word: Place, pieces: Pieces) -> list[int]:
    """A word's ids: after a space where it stands after white space or at the beginning, as in the middle of a text."""
    spaced = word.start == 0 or passage[word.start - 1].isspace()
    return list(pieces(f"{' ' if spaced else ''}{passage[word.start : word.stop]}"))


def normalized(answer: str) -> str:
    """An answer without case, punctuation, articles and needless white space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())
