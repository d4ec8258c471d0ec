"""Extractive question answering: the model marks an answer in a passage; scored as in SQuAD (Rajpurkar et al. 2016)."""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.data.batch import PADDING, Batch, SpanRows
from vlm.data.text.passages import find_words, normalize_answer
from vlm.errors import Count, UserError
from vlm.evaluation.metrics.bootstrap import Scorer, intervals, mean_scorer
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import SampleMetric
from vlm.evaluation.report.content import MAX_SAMPLES, Section, Table, pick_samples
from vlm.models.classifier import TokenClassifier
from vlm.tasks.shared.text_tasks import MostFrequent, TextTask, beginnings, overlapping_span
from vlm.tasks.span_answering.predict import choose_answer, likeliest_spans, span_scores
from vlm.training.data_module import Data
from vlm.training.step.losses import Term
from vlm.training.step.optim import Optimization
from vlm.untrusted.sizes import JsonValue

NAMES = ("exact_match", "f1")


class AnsweredQuestion(NamedTuple):
    """A question of an evaluation with the predicted answer, empty for no answer."""

    question: str
    context: str
    answers: Sequence[str]
    predicted: str
    probability: float


def score_answer(predicted: str, answers: Sequence[str]) -> tuple[float, float]:
    """Returns exact match and F1 with the best-fitting true answer; without one, an empty prediction is right."""
    predicted = normalize_answer(predicted)
    exact, f1 = [], []
    for true in [text for text in map(normalize_answer, answers) if text] or [""]:
        exact.append(float(predicted == true))
        counts = Counter(predicted.split()), Counter(true.split())
        both_empty = not predicted and not true
        f1.append(float(both_empty) or 2 * (counts[0] & counts[1]).total() / max(1, sum(map(Counter.total, counts))))
    return max(exact), max(f1)


class SpanMetric(SampleMetric[AnsweredQuestion]):
    """Scores over all questions of all processes.

    Attributes:
        answers: Answers of controls to the questions of the last `compute`.
    """

    kind, unit = AnsweredQuestion, "question"
    answers: dict[str, list[str]]

    def compute(self) -> dict[str, float]:
        """Returns exact_match and f1; also for each kind, if only some questions have an answer.

        Raises:
            UserError: Nothing was added.
        """
        return self.score([question.predicted for question in self.gather()])

    def score(self, predicted: Sequence[str]) -> dict[str, float]:
        """Returns the scores of other answers to the same questions."""
        values = self._values(predicted)
        has_answer = np.array([bool(question.answers) for question in self.samples.values()])
        scores = dict(zip(NAMES, values.mean(0).tolist(), strict=True))
        if has_answer.any() and not has_answer.all():
            for kind, chosen in (("answerable", has_answer), ("unanswerable", ~has_answer)):
                scores |= {f"{name}_{kind}": value for name, value in zip(NAMES, values[chosen].mean(0), strict=True)}
        return {name: float(value) for name, value in scores.items()}

    def controls(self, train: Iterable[tuple[str, str]]) -> dict[str, float]:
        """Returns the scores of two controls that need no model.

        Args:
            train: Questions of training with their answers.
        Returns:
            metric@overlap, of a part of the context near words of the question (see `overlapping_span`);
            metric@question, of the most frequent answer in train to the question, or to those with the same beginning.
        """
        frequent = MostFrequent((beginnings(question), answer) for question, answer in train)
        questions = self.samples.values()
        self.answers = {
            "overlap": [overlapping_span(item.question, item.context) for item in questions],
            "question": [frequent.value(beginnings(item.question)) for item in questions],
        }
        scores = {control: self.score(texts) for control, texts in self.answers.items()}
        return {f"{name}@{control}": values[name] for control, values in scores.items() for name in NAMES}

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns the scorers of a metric of the model and of a control, and the number of questions."""
        place, texts = NAMES.index(metric), [question.predicted for question in self.samples.values()]
        sides = (self._values(predicted)[:, [place]] for predicted in (texts, self.answers[control]))
        model, baseline = map(mean_scorer, sides)
        return model, baseline, len(texts)

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns both scores at @low and @high: 95% intervals by bootstrap over questions."""
        values = self._values([question.predicted for question in self.samples.values()])
        return intervals(NAMES, mean_scorer(values), len(values), seed=seed)

    def rows_of(self) -> list[dict[str, Any]]:
        """Returns the questions with their answers and scores."""
        values = self._values([question.predicted for question in self.samples.values()]).tolist()
        rows = zip(super().rows_of(), values, strict=True)
        return [row | dict(zip(NAMES, row_scores, strict=True)) for row, row_scores in rows]

    def _values(self, predicted: Sequence[str]) -> Floats:
        """Returns both scores of each question. Shapes: -> (N, 2)"""
        pairs = zip(predicted, self.samples.values(), strict=True)
        return np.array([score_answer(text, question.answers) for text, question in pairs])


HEADER = ("question", "answer", "probability", "true answers")


def _cells(row: Mapping[str, Any]) -> list[str]:
    true = " | ".join(dict.fromkeys(row["answers"])) or "(none)"
    return [row["question"], row["predicted"] or "(none)", f"{row['probability']:.0%}", true]


def _line(row: Mapping[str, Any]) -> str:
    question, predicted, _, true = _cells(row)
    return f"{'=' if row['exact_match'] else ' '} {question} {predicted}   true: {true}"


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
            windows = [(first, next(spans)) for first in firsts]
            answer = choose_answer(context, find_words(context), windows, abstains=self.field.abstains)
            answered.append(AnsweredQuestion(question, context, answers, answer.text, answer.probability))
        self.metric.update(batch.ids, answered)

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        results = self.metric.compute()
        self.show(self.metric.rows_of(), _line)
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

    def details(self) -> dict[str, JsonValue]:
        return {"questions": self.metric.rows_of()}

    def report(self) -> list[Section]:
        """Random answers, and the most confident ones that share no word with a true one."""
        rows = self.metric.rows_of()
        wrong = sorted((row for row in rows if not row["f1"]), key=lambda row: -row["probability"])[:MAX_SAMPLES]
        kinds = {"Random answers": pick_samples(rows), "Most confident mistakes": wrong}
        return [Section(title, [Table(HEADER, list(map(_cells, chosen)))]) for title, chosen in kinds.items() if chosen]

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

    def description(self) -> dict[str, JsonValue]:
        return {**super().description(), "longest": self.longest}


def _loss(scores: Tensor, rows: SpanRows) -> dict[str, Term]:
    """Returns the mean of the cross-entropies of start and end, summed over windows."""
    return {"windows": Term(F.cross_entropy(scores, rows.ends, reduction="sum") / 2, len(rows.ends))}
