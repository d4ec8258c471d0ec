"""The field of questions with passages for extractive question answering."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch

from vlm.data.batch import SpanRows
from vlm.data.fields import AugmentKey
from vlm.data.records import Record
from vlm.data.text.input_fields import EncodedField
from vlm.data.text.inputs import Encoded, input_rows
from vlm.data.text.passages import Window, covering, encode_passage, word_places
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import Count, Range


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
        words = word_places(context)
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
        span = covering(words, start, start + len(text))
        texts = (question, context, *(text for text, _ in answers)) if key is None else ()
        return Spans(windows, [_ends(window, span) for window in windows], texts)

    def length(self, record: Record) -> int:
        return sum(len(window.row.ids) for window in self.encode(record, ()).windows)

    def collate(self, values: Sequence[Spans]) -> SpanRows:  # type: ignore[override]
        samples = [Encoded([window.row for window in value.windows], value.texts) for value in values]
        rows = input_rows(samples, self.tokenizer.pad_id)
        ends = torch.tensor([ends for value in values for ends in value.ends], dtype=torch.long)
        firsts = [[window.first for window in value.windows] for value in values]
        return SpanRows(**vars(rows), ends=ends, firsts=firsts)


def _ends(window: Window, span: tuple[int, int] | None) -> tuple[int, int]:
    """Start and end token of a span of words in a window; the first token if the span is not inside."""
    places = window.row.places
    if span is None or span[0] < window.first or span[1] - window.first + 1 >= len(places):
        return places[0], places[0]
    return places[span[0] - window.first + 1], places[span[1] - window.first + 1]
