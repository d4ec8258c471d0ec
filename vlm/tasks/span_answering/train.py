"""Extractive question answering: the model reads a question and a passage, and marks the answer's start and end."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.data.batch import PADDING, Batch, SpanRows
from vlm.data.text.passages import find_words
from vlm.errors import Count, UserError
from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.evaluation.report.sections import Section
from vlm.models.classifier import TokenClassifier
from vlm.tasks.shared.text_task import TextTask
from vlm.tasks.span_answering.metrics import AnsweredQuestion, SpanMetric, span_line, span_sections
from vlm.tasks.span_answering.predict import SpanAnswer, choose_answer, likeliest_spans, span_scores
from vlm.training.data_module import Data
from vlm.training.step.losses import Term
from vlm.training.step.optim import Optimization

READ = 100_000  # training questions that a control reads


class SpanAnswering(TextTask):
    """Trains by the cross-entropies of the answer's start and end among the tokens of a window (Devlin et al. 2019).

    Args:
        model, optimization, seed, freeze: As in Task; the model is a TokenClassifier with two outputs.
        fields: questions with their passages.
        longest: Longest answer, in tokens.
    Raises:
        UserError: Words shared with the question are marked, which the model cannot read.
    """

    name = "span_answering"
    headlines = ("exact_match", "f1")
    curves = ("exact_match", "f1")
    text_field = unit = "questions"
    counted_unit = "windows"
    model: TokenClassifier

    def __init__(
        self,
        *,
        model: TokenClassifier,
        fields: Mapping[str, Any],
        seed: int,
        optimization: Optimization | None = None,
        freeze: Sequence[str] = (),
        longest: Count = 30,
    ) -> None:
        super().__init__(model=model, fields=fields, seed=seed, optimization=optimization, freeze=freeze)
        self.longest, self.metric = longest, SpanMetric()
        token_types = getattr(model.encoder.type_embed, "num_embeddings", 0)
        if self.field.marks_shared and token_types < 3:
            fault = f"marks_shared=true needs 3 token types, but the model has {token_types}"
            raise UserError(f"task.fields.questions.{fault}; set task.fields.questions.marks_shared=false")

    def loss(self, batch: Batch) -> dict[str, Term]:
        return _loss(span_scores(self.model, batch["questions"]), batch["questions"])

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        rows: SpanRows = batch["questions"]
        with torch.inference_mode():
            scores = span_scores(self.model, rows)
        self.evaluation.add_loss(_loss(scores, rows))
        spans = iter(likeliest_spans(scores, longest=self.longest))
        answered = []
        for (question, context, *answers), firsts in zip(rows.texts, rows.firsts, strict=True):
            answer = self._answer(context, [(first, next(spans)) for first in firsts])
            answered.append(AnsweredQuestion(question, context, answers, answer.text, answer.probability))
        self.metric.update(batch.ids, answered)

    def _answer(self, context: str, windows: Sequence[Any]) -> SpanAnswer:
        return choose_answer(context, find_words(context), windows, abstains=self.field.abstains)

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        results = self.metric.compute()
        self.show(self.metric.rows_of(), span_line)
        if final:
            train = islice(self.data.split("train").records(), READ)
            pairs = ((record["question"], record["answers"][0][0] if record["answers"] else "") for record in train)
            results |= self.metric.controls(pairs) | self.metric.intervals(seed=self.seed)
        return results

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        return self.metric.scorers(metric, control)

    def predictions(self) -> list[dict[str, Any]]:
        names = {"id": "id", "question": "question", "answer": "predicted"}
        return [{name: row[column] for name, column in names.items()} for row in self.metric.rows_of()]

    def details(self) -> dict[str, Any]:
        return {"questions": self.metric.rows_of()}

    def report(self) -> list[Section]:
        return span_sections(self.metric.rows_of())

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        rows, tokenizer = batch["questions"], self.field.tokenizer
        start, last = rows.ends[0].tolist()  # first tokens of words
        length = int((rows.segments[0] != PADDING).sum()) - 1  # without the end token
        stop = min([place for place in rows.places.tolist() if last < place < length], default=length)
        pieces = [repr(tokenizer.piece(token)) for token in rows.tokens[0, start:stop].tolist()]
        answer = " ".join(pieces) if last else "none in this part of the passage"
        return [*super().reading(batch, tokens), f"  answer    {answer}"]

    def example(self, data: Data, folder: Path) -> str:
        record = data.split(data.final_split).record(0)
        path = folder / "example.txt"
        path.write_text(record["context"], encoding="utf-8")
        return f"vlm answer {shlex.quote(str(path))} --question {shlex.quote(record['question'])}"

    def description(self) -> dict[str, Any]:
        return {**super().description(), "longest": self.longest}


def _loss(scores: Tensor, rows: SpanRows) -> dict[str, Term]:
    """Returns the mean of the cross-entropies of start and end, summed over windows."""
    return {"windows": Term(F.cross_entropy(scores, rows.ends, reduction="sum") / 2, len(rows.ends))}
