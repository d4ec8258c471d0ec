"""Accuracy of answers to questions, in all and by kind of question, with controls that do not see the image."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vlm.data.records import Question
from vlm.errors import UserError
from vlm.evaluation.metrics.bootstrap import intervals, ratio_scorer
from vlm.evaluation.metrics.records import RecordMetric
from vlm.tasks.shared.text_controls import MostFrequent

COLUMNS = ("image_id", "question", "answer", "kind")
CONTROLS = ("shuffled", "blank")  # beside another image, and beside none


class AnswerMetric(RecordMetric):
    """The share of questions whose answer is word for word the right one.

    Attributes:
        answers: The questions of the last `compute`, sorted by image: ``COLUMNS``, and the answers beside their own
            image, "predicted", and under control.
    """

    answers: list[dict[str, Any]]

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
        """``accuracy``, and ``accuracy_KIND`` where questions are of several kinds.

        Raises:
            UserError: Nothing was added.
        """
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for number, column, text, *known in self.rows().values():
            rows.setdefault((known[0], number), dict(zip(COLUMNS, known, strict=True)))[column] = text
        self.answers = [row for row in rows.values() if "predicted" in row]  # not where the own image is unreadable
        if not self.answers:
            raise UserError("no question to score: no image could be read, or the split is empty", status=1)
        return self._accuracies("predicted")

    def controls(self, train: Iterable[Question]) -> dict[str, float]:
        """metric@constant, of the answer that each question has most often in train; metric@shuffled and @blank.

        A control is over the questions that were asked under it.

        The first is what is known without any image. A question that train lacks has the most frequent answer of its
        kind there.
        """
        pairs = (((("text", text), ("kind", kind)), answer) for text, answer, kind in train)
        frequent = MostFrequent(pairs, of_equals=max)
        for row in self.answers:
            row["constant"] = frequent.value((("text", row["question"]), ("kind", row["kind"])))
        scores = {control: self._accuracies(control) for control in ("constant", *CONTROLS)}
        return {f"{name}@{control}": value for control, values in scores.items() for name, value in values.items()}

    def intervals(self, *, seed: int) -> dict[str, float]:
        """accuracy@low and accuracy@high: its 95% interval, by bootstrap over images."""
        images = {image: place for place, image in enumerate(dict.fromkeys(row["image_id"] for row in self.answers))}
        counts = np.zeros((len(images), 2))
        for row in self.answers:
            counts[images[row["image_id"]]] += (row["predicted"] == row["answer"], 1)
        return intervals(["accuracy"], ratio_scorer(counts), len(images), seed=seed)

    def kinds(self) -> list[str]:
        """Kinds of the questions, if there are several."""
        kinds = sorted({row["kind"] for row in self.answers})
        return kinds if len(kinds) > 1 else []

    def _accuracies(self, column: str) -> dict[str, float]:
        right = [(row["kind"], row[column] == row["answer"]) for row in self.answers if column in row]
        hits = {"accuracy": [hit for _, hit in right]}
        hits |= {f"accuracy_{kind}": [hit for one, hit in right if one == kind] for kind in self.kinds()}
        return {name: sum(flags) / len(flags) for name, flags in hits.items() if flags}

    def _start(self) -> None:
        super()._start()
        self.answers = []
