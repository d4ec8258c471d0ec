"""Accuracy of answers to questions, in all and by kind of question, with controls that do not see the image."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vlm.data.records import Question
from vlm.errors import UserError
from vlm.evaluation.metrics.bootstrap import intervals
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import RecordMetric
from vlm.evaluation.metrics.text_controls import MostFrequent

# Of each question: its image, text, answer and kind, and what was answered beside its own image and under control.
COLUMNS = ("image_id", "question", "answer", "kind", "predicted", "shuffled", "blank")
CONTROLS = ("shuffled", "blank")


class AnswerMetric(RecordMetric):
    """The share of questions whose answer is word for word the right one.

    Attributes:
        answers: The questions of the last `compute`, as ``COLUMNS``, sorted by image.
    """

    answers: list[dict[str, Any]]

    def update(
        self, ids: Sequence[str], questions: Sequence[Sequence[Question]], *answers: Sequence[Sequence[str]]
    ) -> None:
        """Adds the questions of some images.

        Args:
            answers: Of each image's questions, the answers of the model, and then those under each of ``CONTROLS``.
        """
        for place, (id, asked) in enumerate(zip(ids, questions, strict=True)):
            by_question = zip(*(of_images[place] for of_images in answers), strict=True)
            rows = zip(asked, by_question, strict=True)
            self.add((f"{id}#{n:04d}", id, *question, *texts) for n, (question, texts) in enumerate(rows))

    def compute(self) -> dict[str, float]:
        """``accuracy``, and ``accuracy_KIND`` where questions are of several kinds.

        Raises:
            UserError: Nothing was added.
        """
        self.answers = [dict(zip(COLUMNS, row, strict=False)) for row in self.rows().values()]
        if not self.answers:
            raise UserError("no question to score: no image could be read, or the split is empty", status=1)
        return self._accuracies("predicted")

    def controls(self, train: Iterable[Question]) -> dict[str, float]:
        """metric@constant, of the answer that each question has most often in train; metric@shuffled and @blank.

        The first is what is known without any image. A question that train lacks has the most frequent answer of its
        kind there.
        """
        frequent = MostFrequent(((("text", text), ("kind", kind)), answer) for text, answer, kind in train)
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

        def score(draws: Floats) -> Floats:
            right, asked = (draws @ counts).T
            return (right / asked)[:, None]

        return intervals(["accuracy"], score, len(images), seed=seed)

    def kinds(self) -> list[str]:
        """Kinds of the questions, where there are several."""
        kinds = sorted({row["kind"] for row in self.answers})
        return kinds if len(kinds) > 1 else []

    def _accuracies(self, column: str) -> dict[str, float]:
        right = [(row["kind"], row[column] == row["answer"]) for row in self.answers]
        scores = {"accuracy": sum(hit for _, hit in right) / len(right)}
        for kind in self.kinds():
            hits = [hit for one, hit in right if one == kind]
            scores[f"accuracy_{kind}"] = sum(hits) / len(hits)
        return scores

    def _start(self) -> None:
        super()._start()
        self.answers = []
