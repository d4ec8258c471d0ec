"""The base of tasks that classify inputs."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from torch import Tensor

from vlm.data.batch import Batch
from vlm.errors import printable
from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.evaluation.report.sections import SHOWN, Confusion, Part, Section, Table, random_places
from vlm.models.classifier import PoolingClassifier
from vlm.tasks.shared.class_metrics import ClassificationMetric
from vlm.training.step.losses import Term
from vlm.training.step.task import Task, TaskOptions

SAMPLES = 32  # samples of an evaluation to show


class ClassTask(Task):
    """Validates and tests by accuracy and calibration; subclasses define how inputs are read and shown.

    Args:
        model, options: As in Task.
        fields: labels, and the fields of the inputs.
    """

    headlines: Sequence[str] = ("accuracy", "balanced_accuracy")
    curves: Sequence[str] = ("accuracy", "calibration_error")
    model: PoolingClassifier

    def __init__(self, *, model: PoolingClassifier, **options: Unpack[TaskOptions]) -> None:
        super().__init__(model=model, **options)
        self.classes = list(options["fields"]["labels"].classes)
        self.metric = ClassificationMetric(num_classes=len(self.classes))

    def probabilities(self, batch: Batch) -> Tensor:
        """Returns class probabilities of each sample, computed as in inference: (B, C), float64."""
        raise TypeError(f"{type(self).__name__} gives no probabilities")

    def texts(self, batch: Batch) -> Sequence[Sequence[str]] | None:
        """Returns the texts of each sample; None for images."""
        return None

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        labels, probabilities = batch["labels"], self.probabilities(batch)
        picked = probabilities.gather(1, labels[:, None])
        self.evaluation.add_loss({"samples": Term(-picked.log().sum(), len(batch.ids))})
        self.metric.update(batch.ids, probabilities, labels, self.texts(batch))

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        results = self.metric.compute()
        records = self.metric.predictions(self.classes)
        spread = records[:: max(1, len(records) // SAMPLES)]  # records are sorted, and so often by class
        self.evaluation.samples = [{**record, "line": self.line(record)} for record in spread[:SAMPLES]]
        if final:
            results |= self.metric.constant(self.fields["labels"].counts("train"))  # type: ignore[attr-defined]
            results |= self.metric.intervals(seed=self.seed)
        return results

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int] | None:
        return self.metric.scorers(control) if control in self.metric.controls else None

    def line(self, record: Mapping[str, Any]) -> str:
        """Returns a prediction as a line to print."""
        mark = "=" if record["predicted"] == record["label"] else " "
        name = record.get("image") or " | ".join(record[name] for name in ("text", "pair") if name in record)
        return f"{mark} {record['predicted']} {record['probability']:.3f}   true: {record['label']}   {printable(name)}"

    def predictions(self) -> list[dict[str, Any]]:
        return self.metric.predictions(self.classes)

    def details(self) -> dict[str, Any]:
        matrix = self.metric.confusion()
        per_class = dict(zip(self.classes, self.metric.per_class(), strict=True))
        return {"accuracy": per_class, "confusion": matrix.tolist(), "classes": self.classes}

    def report(self) -> list[Section]:
        """The confusion matrix, the scores of each class, the most confident mistakes, and random samples."""
        confusion = Confusion(self.metric.confusion().tolist(), self.classes)
        records = self.predictions()
        wrong = [record for record in records if record["predicted"] != record["label"]]
        wrong.sort(key=lambda record: -record["probability"])
        random = [records[at] for at in random_places(len(records))]
        kinds = {"Surest mistakes": wrong[:SHOWN], "Random samples": random}
        shown = [Section(title, [self.shown(kind)]) for title, kind in kinds.items() if kind]
        return [Section("Classes", [confusion, self.class_table()]), *shown]

    def class_table(self) -> Table:
        """The scores of each class."""
        return Table(["class", "accuracy"], list(zip(self.classes, map(share, self.metric.per_class()), strict=True)))

    def shown(self, records: Sequence[Mapping[str, Any]]) -> Part:
        """Returns some predictions for the report."""
        raise TypeError(f"{type(self).__name__} shows no predictions")


def share(value: float | None) -> str:
    return "no samples" if value is None else f"{value:.1%}"
