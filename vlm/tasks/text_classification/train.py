"""Text classification: the model assigns a class to a text or a pair of texts."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Unpack

import numpy as np
from torch import Tensor

from vlm.data.batch import Batch
from vlm.errors import Range, UserError
from vlm.evaluation.report.content import Table
from vlm.models.classifier import SequenceClassifier
from vlm.tasks.shared.classes import ClassPrediction, ClassTask, find_name
from vlm.tasks.shared.distillation import ClassDistillation, DistilledTask, Teacher
from vlm.tasks.shared.text_tasks import NaiveBayes, TextTask, bag_of
from vlm.tasks.text_classification.predict import text_probabilities
from vlm.training.data_module import Data
from vlm.training.step.losses import Term, check_dropout, class_loss, consistent_class_terms
from vlm.training.step.task import TaskOptions
from vlm.untrusted.sizes import JsonValue

MAX_CHARACTERS = 400  # of a text in a report


class TextClassification(DistilledTask, TextTask, ClassTask):
    """Trains by cross-entropy.

    Args:
        model, options: As in ClassTask; the model is a SequenceClassifier.
        fields: texts, and labels.
        consistency: Factor of the divergence of two passes with other dropout (R-Drop, Liang et al. 2021); 0 for none.
        teacher: A model whose predictions the trained model learns; None for none.
    """

    name = "text_classification"
    headlines = ("accuracy", "f1")
    curves = ("accuracy", "f1", "calibration_error")
    unit = counted_unit = "texts"
    model: SequenceClassifier

    def __init__(
        self,
        *,
        model: SequenceClassifier,
        consistency: Annotated[float, Range(0)] = 0.0,
        teacher: Teacher | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(model=model, **options)
        self.consistency = consistency
        if consistency:
            check_dropout(model)
        if teacher is not None and teacher.path is not None:
            if consistency:
                raise UserError("task.consistency: cannot be combined with task.teacher; leave one of them out")
            self.distillation = ClassDistillation(self, SequenceClassifier, teacher, self._logits)

    @staticmethod
    def _logits(model: SequenceClassifier, batch: Batch, images: Tensor | None = None) -> Tensor:
        rows = batch["texts"]
        return model(rows.tokens, rows.segments, rows.types, rows.layout)

    def loss(self, batch: Batch) -> dict[str, Term]:
        logits = self._logits(self.model, batch)
        if self.consistency:
            passes, labels = (logits, self._logits(self.model, batch)), batch["labels"]
            options = {"weight": self.consistency, "label_smoothing": self.label_smoothing}
            return consistent_class_terms("texts", passes, labels, len(labels), **options)
        terms = {"texts": Term(*class_loss(logits, batch["labels"], label_smoothing=self.label_smoothing))}
        return terms if self.distillation is None else self.distillation.terms(batch, terms, logits)

    def counts(self, batch: Batch) -> dict[str, int] | None:
        if self.consistency:
            return {"texts": len(batch.ids), "consistency": len(batch.ids)}
        return self.distilled_counts(batch, "texts", len(batch.ids))

    def probabilities(self, batch: Batch) -> Tensor:
        return text_probabilities(self.model, batch["texts"])

    def texts(self, batch: Batch) -> Sequence[Sequence[str]]:
        return batch["texts"].texts

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        results = super().evaluation_results(split, loss, final=final)
        of_classes = [value for value in self.metric.f1() if value is not None]
        results["f1"] = sum(of_classes) / len(of_classes)
        if final:
            texts = self.field.texts_of
            train = ((bag_of(texts(record)), record["label"]) for record in self.data.split("train").records())
            bag = NaiveBayes(train, len(self.classes))  # a control that ignores the order of words
            records = self.data.split(split).records()
            right = {record.id: bag.predict(bag_of(texts(record))) == record["label"] for record in records}
            self.metric.controls["bag"] = np.array([right[id] for id in self.metric.ids], bool)
            results["accuracy@bag"] = sum(right.values()) / len(right)
        return results

    def details(self) -> dict[str, JsonValue]:
        return super().details() | {"f1": dict(zip(self.classes, self.metric.f1(), strict=True))}

    def class_scores(self) -> dict[str, list[float | None]]:
        return {**super().class_scores(), "F1": self.metric.f1()}

    def render_predictions(self, records: Sequence[ClassPrediction]) -> Table:
        rows = []
        for record in records:
            text = find_name(record)
            text = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."
            rows.append((f"{record['predicted']} {record['probability']:.0%}", record["label"], text))
        return Table(["predicted", "true", "text"], rows)

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        names = ", ".join(self.classes[label] for label in batch["labels"][:8])
        return [*super().reading(batch, tokens), f"  classes   {names}"]

    def example(self, data: Data, folder: Path) -> str:
        texts = self.field.texts_of(data.split(data.final_split).record(0))
        options = (f"--{name} {shlex.quote(text)}" for name, text in zip(("text", "pair"), texts, strict=False))
        return f"vlm classify {' '.join(options)}"
