"""Encodes a question and a passage in windows, with the positions of the passage's words."""

import re
import string
from collections.abc import Sequence
from typing import NamedTuple

import regex

from vlm.data.text.characters import whole
from vlm.data.text.inputs import Input, Pieces
from vlm.data.text.tokenizer import Tokenizer

# Runs of letters and digits; other signs, and characters of scripts without spaces, are separate words.
_ALONE = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORDS = regex.compile(rf"[{_ALONE}]|(?:(?![{_ALONE}])[\w\p{{No}}])+|\S")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class WordSpan(NamedTuple):
    """A word's position in its text, in Unicode code points."""

    start: int
    stop: int


class Window(NamedTuple):
    """A row with a part of a passage.

    Args:
        row: The question and the part; `places` has the first token, then each word's first token.
        first: Index of the part's first word in the passage.
    """

    row: Input
    first: int


def word_places(text: str) -> list[WordSpan]:
    """The words of a text; they cover everything except white space and split no grapheme cluster."""
    spans = (match.span() for match in _WORDS.finditer(text))
    return [WordSpan(*span) for span in (spans if text.isascii() else whole(spans, text))]


def covering(words: Sequence[WordSpan], start: int, stop: int) -> tuple[int, int] | None:
    """Indices of the first and last word of a part of the text; None if it contains none."""
    inside = [number for number, word in enumerate(words) if word.start < stop and word.stop > start]
    return (inside[0], inside[-1]) if inside else None


def encode_passage(
    tokenizer: Tokenizer,
    max_len: int,
    stride: int,
    question: str,
    passage: str,
    *,
    words: Sequence[WordSpan] | None = None,
    pieces: Pieces | None = None,
    marks_shared: bool = False,
) -> list[Window]:
    """Encodes a question and a passage as begin, question, end, part of the passage, end; in as many rows as needed.

    Windows overlap, so that every short span is whole in one of them. A question that takes more than half of a row is
    truncated.

    Args:
        stride: Maximum number of tokens between windows; at least one word, at most a whole window.
        words: Words of the passage, if known.
        pieces: A cached function from words to ids.
        marks_shared: Whether words that also occur in the question (ignoring case) have type 2 instead of 1 (exact
            match, Chen et al. 2017, section 3.2).
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


def _shared(question: str, passage: str, words: Sequence[WordSpan]) -> list[int]:
    """Type of each word of a passage: 2 if the question contains it too, else 1, as for punctuation."""
    asked = {question[slice(*word)].casefold() for word in word_places(question)}
    texts = (passage[slice(*word)].casefold() for word in words)
    return [2 if text in asked and text[0].isalnum() else 1 for text in texts]


def _ids(passage: str, word: WordSpan, pieces: Pieces) -> list[int]:
    """Token ids of a word, with a leading space at the beginning and after white space."""
    spaced = word.start == 0 or passage[word.start - 1].isspace()
    return list(pieces(f"{' ' if spaced else ''}{passage[word.start : word.stop]}"))


def normalized(answer: str) -> str:
    """Normalises an answer: no case, punctuation, articles or extra white space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())
