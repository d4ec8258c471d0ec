"""Questions with passages for extractive question answering, encoded in windows."""

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import regex
import torch

from vlm.data.batch import SpanRows
from vlm.data.fields import AugmentKey
from vlm.data.records import Record
from vlm.data.text.inputs import EncodedField, EncodedSample, Input, Pieces, input_rows
from vlm.data.text.tokenizer import Tokenizer
from vlm.data.text.words import merge_graphemes
from vlm.errors import Count, Range

# Runs of letters and digits; other signs, and characters of scripts without spaces, are separate words.
_SPACELESS = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORDS = regex.compile(rf"[{_SPACELESS}]|(?:(?![{_SPACELESS}])[\w\p{{No}}])+|\S")
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


def find_words(text: str) -> list[WordSpan]:
    """The words of a text; they cover everything except white space and split no grapheme cluster."""
    spans = (match.span() for match in _WORDS.finditer(text))
    return [WordSpan(*span) for span in (spans if text.isascii() else merge_graphemes(spans, text))]


def find_covering_words(words: Sequence[WordSpan], start: int, stop: int) -> tuple[int, int] | None:
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
    words = find_words(passage) if words is None else words
    kinds = [1] * len(words)
    if marks_shared:  # 2 for words of the question, but not for punctuation
        shared = {question[slice(*word)].casefold() for word in find_words(question)}
        texts = (passage[slice(*word)].casefold() for word in words)
        kinds = [2 if text in shared and text[0].isalnum() else 1 for text in texts]
    question_ids = tokenizer.encode(question)[: max_len // 2]
    head = [tokenizer.bos_id, *question_ids, tokenizer.eos_id]
    room = max_len - len(head) - 1
    ids = []
    for word in words:  # with a leading space at the beginning and after white space
        space = " " if word.start == 0 or passage[word.start - 1].isspace() else ""
        ids.append(list((pieces or tokenizer.encode)(space + passage[word.start : word.stop]))[:room])
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


def normalize_answer(answer: str) -> str:
    """Normalises an answer: no case, punctuation, articles or extra white space."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


class Spans(NamedTuple):
    """Windows of a question and passage, start and end token of the answer in each, and the texts in evaluation."""

    windows: Sequence[Window]
    ends: Sequence[tuple[int, int]]
    texts: Sequence[str] = ()


class PassageField(EncodedField):
    """A question and its passage, split into windows if it is long, with the first answer's span in each.

    In a window that does not contain the whole answer, the target is the first token (Devlin et al. 2019, section 4.3).
    A record's answers are pairs of a text and its offset in the context.

    Args:
        tokenizer, max_len: See EncodedField.
        stride: Number of tokens between the starts of windows.
        marks_shared: See `encode_passage`; the encoder then needs three token types.
    Shapes:
        SpanRows of tokens (R, L), R the number of windows of all samples
    """

    needs = ("question", "context", "answers")
    abstains = False  # whether some training questions have no answer

    def __init__(
        self, *, tokenizer: Tokenizer, max_len: Annotated[int, Range(6)], stride: Count, marks_shared: bool = False
    ) -> None:
        super().__init__(tokenizer=tokenizer, max_len=max_len)
        self.stride, self.marks_shared = stride, marks_shared

    def texts(self) -> Iterator[str]:
        passage = None
        for record in self._train.records():
            yield record["question"]
            if record["context"] != passage:  # questions about the same passage are adjacent
                yield (passage := record["context"])

    def prepare(self) -> None:
        super().prepare()
        self.abstains = any(not record["answers"] for record in self._train.records())

    def state(self) -> dict[str, Any]:
        return super().state() | {"stride": self.stride, "abstains": self.abstains, "marks_shared": self.marks_shared}

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.abstains = bool(about["abstains"])

    @property
    def sizes(self) -> dict[str, int]:
        types = {"token_types": 3} if self.marks_shared else {}
        return {**super().sizes, **types, "num_classes": 2}  # scores of start and end

    def texts_of(self, record: Record) -> Sequence[str]:
        return record["question"], record["context"]

    def identity(self, record: Record) -> Sequence[str]:
        return (*self.texts_of(record), *(f"{start} {text}" for text, start in record["answers"]))

    def encode(self, record: Record, key: AugmentKey | None) -> Spans:
        question, context, answers = (record[name] for name in self.needs)
        words = find_words(context)
        windows = encode_passage(
            self.tokenizer,
            self.max_len,
            self.stride,
            question,
            context,
            words=words,
            pieces=self.pieces,
            marks_shared=self.marks_shared,
        )
        text, start = answers[0] if answers else ("", 0)
        span = find_covering_words(words, start, start + len(text))
        ends = []
        for (_, _, places), number in windows:
            is_inside = span is not None and span[0] >= number and span[1] - number + 1 < len(places)
            first, last = (word - number + 1 for word in span) if span is not None and is_inside else (0, 0)
            ends.append((places[first], places[last]))
        texts = (question, context, *(text for text, _ in answers)) if key is None else ()
        return Spans(windows, ends, texts)

    def length(self, record: Record) -> int:
        return sum(len(window.row.ids) for window in self.encode(record, ()).windows)

    def collate(self, values: Sequence[Spans]) -> SpanRows:  # type: ignore[override]
        samples = [EncodedSample([window.row for window in value.windows], value.texts) for value in values]
        rows = input_rows(samples, self.tokenizer.pad_id)
        ends = torch.tensor([ends for value in values for ends in value.ends], dtype=torch.long)
        firsts = [[window.first for window in value.windows] for value in values]
        return SpanRows(**vars(rows), ends=ends, firsts=firsts)
