"""Accuracy of answers to questions, overall and by kind, with controls that do not see the image."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from vlm.data.records import Question
from vlm.errors import UserError
from vlm.evaluation.metrics.bootstrap import Scorer, intervals, ratio_scorer
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import RecordMetric
from vlm.tasks.image_questions.scores import anls, caption_scores, vqa_accuracy
from vlm.tasks.shared.text_controls import MostFrequent

COLUMNS = ("image_id", "question", "answer", "kind", "answers", "before")
CONTROLS = ("shuffled", "blank")  # with another image, and with a blank one
SCORES = ("vqa_accuracy", "anls", "captions")  # further scores
CAPTION = "caption"  # kind of question whose answers are captions


class AnswerMetric(RecordMetric):
    """The share of questions whose answer equals a right one exactly.

    Args:
        scores: Further scores, from ``SCORES``.
    Attributes:
        answers: The questions of the last `compute`, sorted by image: ``COLUMNS``, the answers with their own image as
            "predicted", and those of the controls.
    """

    answers: list[dict[str, Any]]

    def __init__(self, scores: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scores = scores

    def update(
        self,
        ids: Sequence[str],
        questions: Sequence[Sequence[Question]],
        answers: Sequence[Sequence[str]],
        column: str = "predicted",
    ) -> None:
        """Adds the answers to the questions about some images.

        Args:
            column: "predicted", or one of ``CONTROLS``.
        """
        for id, asked, texts in zip(ids, questions, answers, strict=True):
            pairs = enumerate(zip(asked, texts, strict=True))
            self.add((f"{id}#{n:04d}#{column}", n, column, text, id, *question) for n, (question, text) in pairs)

    def compute(self) -> dict[str, float]:
        """Returns ``accuracy``, and ``accuracy_KIND`` if there are several kinds of questions.

        Raises:
            UserError: Nothing was added.
        """
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for number, column, text, *known in self.rows().values():
            pairs = zip(COLUMNS, known, strict=True)
            row = {name: value for name, value in pairs if value or name not in ("answers", "before")}
            rows.setdefault((known[0], number), row)[column] = text
        self.answers = [row for row in rows.values() if "predicted" in row]  # not if the own image is unreadable
        if not self.answers:
            raise UserError("no question to score: no image could be read, or the split is empty", status=1)
        return self._accuracies("predicted") | self._scored()

    def _scored(self) -> dict[str, float]:
        """Returns the further scores over all questions; caption scores over those of kind "caption", if any."""
        pairs = [(row["predicted"], row.get("answers") or [row["answer"]]) for row in self.answers]
        of_answers = {"vqa_accuracy": vqa_accuracy, "anls": anls}
        found = {
            name: fmean(score(text, right) for text, right in pairs)
            for name, score in of_answers.items()
            if name in self.scores
        }
        if "captions" in self.scores:
            chosen = [at for at, row in enumerate(self.answers) if row["kind"] == CAPTION] or range(len(pairs))
            texts, references = zip(*(pairs[at] for at in chosen), strict=True)
            found |= caption_scores([str(at) for at in chosen], texts, references)
        return found

    def controls(self, train: Iterable[Question]) -> dict[str, float]:
        """Returns metric@constant, of each question's most frequent answer in train, metric@shuffled and metric@blank.

        A control covers only the questions that were asked under it. metric@constant shows what can be known without
        images: a question that train lacks in its conversation gets the most frequent answer to it elsewhere, or to
        questions of its kind.
        """
        pairs = ((_keys(question.text, question.kind, question.before), question.answer) for question in train)
        frequent = MostFrequent(pairs, of_equals=max)
        for row in self.answers:
            row["constant"] = frequent.value(_keys(row["question"], row["kind"], row.get("before", ())))
        scores = {control: self._accuracies(control) for control in ("constant", *CONTROLS)}
        return {f"{name}@{control}": value for control, values in scores.items() for name, value in values.items()}

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns accuracy@low and accuracy@high: a 95% interval by bootstrap over images."""
        counts = self._counts("predicted", self.answers)
        return intervals(["accuracy"], ratio_scorer(counts), len(counts), seed=seed)

    def scorers(self, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns the scorers of the accuracy of the model and of a control, and the number of images.

        They cover the questions that were asked under the control.
        """
        rows = [row for row in self.answers if control in row]
        own, other = (self._counts(column, rows) for column in ("predicted", control))
        return ratio_scorer(own), ratio_scorer(other), len(own)

    def _counts(self, column: str, rows: Sequence[Mapping[str, Any]]) -> Floats:
        """Counts the right answers and the questions of each image. Shapes: -> (N, 2)"""
        images = {image: place for place, image in enumerate(dict.fromkeys(row["image_id"] for row in rows))}
        counts = np.zeros((len(images), 2))
        for row in rows:
            counts[images[row["image_id"]]] += (is_right(row, column), 1)
        return counts

    def kinds(self) -> list[str]:
        """Returns the kinds of questions, if there are several."""
        kinds = sorted({row["kind"] for row in self.answers})
        return kinds if len(kinds) > 1 else []

    def _accuracies(self, column: str) -> dict[str, float]:
        right = [(row["kind"], is_right(row, column)) for row in self.answers if column in row]
        hits = {"accuracy": [hit for _, hit in right]}
        hits |= {f"accuracy_{kind}": [hit for one, hit in right if one == kind] for kind in self.kinds()}
        return {name: sum(flags) / len(flags) for name, flags in hits.items() if flags}

    def _start(self) -> None:
        super()._start()
        self.answers = []


def is_right(row: Mapping[str, Any], column: str = "predicted") -> bool:
    """Returns True if the answer of a row equals a right one exactly."""
    return row[column] == row["answer"] or row[column] in row.get("answers", ())


def _keys(text: str, kind: str, before: Sequence[Sequence[str]]) -> list[Hashable]:
    """Returns keys of a question that do not depend on the image, from the most specific to the most general."""
    earlier = (part for turn in before for part in turn)
    return [("turns", *earlier, text), ("text", text), ("kind", kind)]
