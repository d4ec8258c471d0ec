"""Extractive question answering about texts with a trained model."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vlm.checkpoint.stored import Metadata
from vlm.data.batch import InputRows
from vlm.data.text.passages import Window, WordSpan, encode_passage, find_words
from vlm.data.text.words import read_lines
from vlm.errors import UserError
from vlm.inference.arguments import FileArguments, list_questions
from vlm.inference.command_options import SpanOptions
from vlm.inference.predictor import BatchPredictor, Rows, Stored, TextPredictor, check_outputs, note_truncation
from vlm.io.files import progress
from vlm.models.classifier import TokenClassifier
from vlm.models.context import Context


class Span(NamedTuple):
    """The likeliest answer within a window.

    Args:
        first, last: Words of the window, counted from 0; -1 for no answer.
        score: Sum of the scores of start and end.
        abstaining: The same sum for no answer.
        probability, abstained: The probabilities of both within the window.
    """

    first: int
    last: int
    score: float
    abstaining: float
    probability: float
    abstained: float


class SpanAnswer(NamedTuple):
    """A part of a text as an answer.

    Args:
        text: The answer; empty if the text has none.
        start: Where it begins, in code points.
        probability: Its probability.
    """

    text: str
    start: int
    probability: float


def span_scores(model: TokenClassifier, rows: InputRows) -> Tensor:
    """Returns scores of start and end in each window, -inf where an answer cannot start or end: (B, L, 2)."""
    assert rows.places is not None
    logits = model(rows.tokens, rows.segments, rows.types, rows.places).float()
    scores = logits.new_full((rows.tokens.numel(), 2), -torch.inf)
    scores = scores.index_copy(0, rows.places, logits).view(*rows.tokens.shape, 2)
    windows = Context(scores).split_packed_rows(rows.layout)
    return windows.states.masked_fill(~windows.full_mask[..., None], -torch.inf)


def likeliest_spans(scores: Tensor, *, longest: int) -> list[Span]:
    """Returns the likeliest answer within each window: the start and end with the highest sum of scores.

    Args:
        longest: Most tokens of an answer.
    Shapes:
        scores (B, L, 2)
    """
    scores = scores.double().cpu()
    starts, ends = scores.unbind(-1)
    length = starts.shape[1]
    words = (starts > -torch.inf).cumsum(1) - 2  # (B, L) the first token counts as word -1
    among = scores.logsumexp(1).sum(-1)  # (B,)
    band = torch.ones(length, length, dtype=torch.bool).triu().tril(longest - 1)
    band[0] = False
    sums = (starts[:, :, None] + ends[:, None]).masked_fill(~band, -torch.inf).flatten(1)  # (B, L * L)
    best, at = sums.max(1)
    abstaining = starts[:, 0] + ends[:, 0]
    first, last = (words.gather(1, place[:, None])[:, 0] for place in (at // length, at % length))
    columns = (first, last, best, abstaining, (best - among).exp(), (abstaining - among).exp())
    return [Span(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def choose_answer(
    context: str, words: Sequence[WordSpan], windows: Sequence[tuple[int, Span]], *, abstains: bool
) -> SpanAnswer:
    """Returns the answer of the window with the highest score (Devlin et al. 2019, section 4.3).

    Args:
        words: Words of the context.
        windows: Index of the first word of each window, and its likeliest answer.
        abstains: Whether no answer is possible: chosen if the lowest score for no answer over all windows is at least
            the best answer's score.
    """
    first, span = max(windows, key=lambda window: window[1].score)
    least = min((span for _, span in windows), key=lambda span: span.abstaining)
    if span.score == -torch.inf or (abstains and least.abstaining >= span.score):
        return SpanAnswer("", -1, least.abstained)
    start, stop = words[first + span.first].start, words[first + span.last].stop
    return SpanAnswer(context[start:stop], start, span.probability)


FileWithQuestions = tuple[str | Path, list[str]]  # a text or its file, and the questions about it
TextWithQuestions = tuple[str, list[str]]


class SpanAnswerer(BatchPredictor[FileWithQuestions, TextWithQuestions, list[SpanAnswer], SpanOptions], TextPredictor):
    """Answers questions about each text with a span of it; arguments as in Predictor."""

    result = SpanAnswer
    returns = "A SpanAnswer; with a list of questions, a list of them"
    task = "span_answering"
    fields = ("file", "question", "answer")
    options = SpanOptions
    arguments = FileArguments
    stored: ClassVar[Stored] = {"max_len": int, "stride": int, "longest": int, "abstains": bool, "marks_shared": bool}
    max_len: int
    stride: int
    longest: int
    abstains: bool
    marks_shared: bool = False  # older checkpoints do not have it
    model: TokenClassifier

    def check(self) -> None:
        check_outputs(self.model.head.weight.T, 2, "scores of start and end")
        self.check_vocabulary(self.model.token_table)
        self.answer_question("a", "b", batch_size=1)

    @classmethod
    def describe(cls, about: Metadata) -> Iterator[str]:
        yield from super().describe(about)
        kind = "by a part of the text" + (", or by none" if about["abstains"] else "")
        yield f"answers     {kind}; windows of {about['max_len']} tokens, each {about['stride']} after the last"

    def sources(self, inputs: Sequence[str | Path], options: SpanOptions) -> list[FileWithQuestions]:
        questions = list_questions(options.question)
        return [(text, questions) for text in inputs]

    def prepare(self, source: FileWithQuestions, options: SpanOptions) -> TextWithQuestions:
        text, questions = source
        content = text if isinstance(text, str) else "".join(read_lines(Path(text)))
        if not content.strip():
            name = "the text" if isinstance(text, str) else text
            raise UserError(f"{name}: is empty; give one that holds the answer")
        return content, questions

    def predict(self, batch: Sequence[TextWithQuestions], options: SpanOptions) -> Iterator[list[SpanAnswer]]:
        for text, questions in batch:
            yield [self.answer_question(question, text, batch_size=options.batch_size) for question in questions]

    @torch.inference_mode()
    def answer_question(self, question: str, context: str, *, batch_size: int) -> SpanAnswer:
        """Returns the answer to a question about a text.

        Args:
            batch_size: Windows of a long text that are read at once.
        """
        words = find_words(context)
        sizes = self.tokenizer, self.max_len, self.stride
        windows = encode_passage(*sizes, question, context, words=words, marks_shared=self.marks_shared)
        spans: list[Span] = []
        starts = range(0, len(windows), batch_size)
        for start in progress(starts, len(starts), "batches"):
            spans += self._spans(windows[start : start + batch_size])
        firsts = [window.first for window in windows]
        return choose_answer(context, words, list(zip(firsts, spans, strict=True)), abstains=self.abstains)

    def _spans(self, windows: Sequence[Window]) -> list[Span]:
        rows = self.encode_rows([[window.row] for window in windows])
        return likeliest_spans(span_scores(self.model, rows), longest=self.longest)

    def answer(self, result: list[SpanAnswer], options: SpanOptions) -> SpanAnswer | list[SpanAnswer]:
        return result[0] if isinstance(options.question, str) else result

    def record(
        self, source: FileWithQuestions, result: list[SpanAnswer], options: SpanOptions, *, form: str = "jsonl"
    ) -> Rows:
        text, questions = source
        name = {"text" if isinstance(text, str) else "file": str(text)}
        return [
            {**name, "question": question, "answer": span.text, "start": span.start, "probability": span.probability}
            for question, span in zip(questions, result, strict=True)
        ]

    def notes(self, sources: Sequence[FileWithQuestions], options: SpanOptions) -> Iterator[str | UserError]:
        lengths = [len(self.tokenizer.encode(question)) for question in list_questions(options.question)]
        yield from note_truncation(lengths, self.max_len // 2, names="questions")
