"""Exact match and F1 of answers that are parts of a passage, as in SQuAD's script (Rajpurkar et al. 2016)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vlm.data.text.passages import normalize_answer
from vlm.evaluation.metrics.bootstrap import Scorer, intervals, mean_scorer
from vlm.evaluation.metrics.records import SampleMetric
from vlm.evaluation.report.sections import MAX_SAMPLES, Section, Table, sample_indices
from vlm.tasks.shared.text_controls import MostFrequent, beginnings, overlapping_span

NAMES = ("exact_match", "f1")


class AnsweredQuestion(NamedTuple):
    """A question of an evaluation with the predicted answer, empty for no answer."""

    question: str
    context: str
    answers: Sequence[str]
    predicted: str
    probability: float


def scores(predicted: str, answers: Sequence[str]) -> tuple[float, float]:
    """Returns exact match and F1 with the best-fitting true answer; without one, an empty prediction is right."""
    true = [text for text in map(normalize_answer, answers) if text] or [""]
    pairs = [
        (float(normalize_answer(predicted) == text), _f1(normalize_answer(predicted).split(), text.split()))
        for text in true
    ]
    return max(exact for exact, _ in pairs), max(f1 for _, f1 in pairs)


def _f1(predicted: Sequence[str], true: Sequence[str]) -> float:
    if not predicted or not true:
        return float(predicted == true)
    common = sum((Counter(predicted) & Counter(true)).values())
    return 2 * common / (len(predicted) + len(true))


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
        model, baseline = (
            mean_scorer(self._values(predicted)[:, [place]]) for predicted in (texts, self.answers[control])
        )
        return model, baseline, len(texts)

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns both scores at @low and @high: 95% intervals by bootstrap over questions."""
        values = self._values([question.predicted for question in self.samples.values()])
        return intervals(NAMES, mean_scorer(values), len(values), seed=seed)

    def rows_of(self) -> list[dict[str, Any]]:
        """Returns the questions with their answers and scores."""
        values = self._values([question.predicted for question in self.samples.values()]).tolist()
        return [
            row | dict(zip(NAMES, row_scores, strict=True))
            for row, row_scores in zip(super().rows_of(), values, strict=True)
        ]

    def _values(self, predicted: Sequence[str]) -> Any:
        """Returns both scores of each question. Shapes: -> (N, 2)"""
        pairs = zip(predicted, self.samples.values(), strict=True)
        return np.array([scores(text, question.answers) for text, question in pairs])


HEADER = ("question", "answer", "probability", "true answers")


def span_sections(rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Returns sections with random answers, and the most confident ones that share no word with a true one.

    Args:
        rows: Questions with their answers and scores.
    """
    wrong = sorted((row for row in rows if not row["f1"]), key=lambda row: -row["probability"])[:MAX_SAMPLES]
    kinds = {"Random answers": [rows[at] for at in sample_indices(len(rows))], "Most confident mistakes": wrong}
    return [Section(title, [Table(HEADER, list(map(_cells, chosen)))]) for title, chosen in kinds.items() if chosen]


def span_line(row: Mapping[str, Any]) -> str:
    """Returns an answer as a line to print."""
    question, predicted, _, true = _cells(row)
    return f"{'=' if row['exact_match'] else ' '} {question} {predicted}   true: {true}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    true = " | ".join(dict.fromkeys(row["answers"])) or "(none)"
    return [row["question"], row["predicted"] or "(none)", f"{row['probability']:.0%}", true]
