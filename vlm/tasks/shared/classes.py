"""The base of tasks that classify inputs, and their metrics, exact over any number of processes."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict, Unpack

import numpy as np
from torch import Tensor

from vlm.data.batch import Batch
from vlm.errors import UserError, printable
from vlm.evaluation.metrics.bootstrap import Scorer, intervals, mean_scorer
from vlm.evaluation.metrics.records import RecordMetric
from vlm.evaluation.report.content import MAX_SAMPLES, Confusion, Part, Section, Table, pick_samples
from vlm.models.classifier import PoolingClassifier
from vlm.training.step.losses import Term
from vlm.training.step.task import Task, TaskOptions
from vlm.untrusted.sizes import JsonValue

TOP = 5
BINS = 15


class ClassPrediction(TypedDict):
    """A sample of an evaluation: an image by its name, or a text or two with an id, and its likeliest classes."""

    image: NotRequired[str]
    id: NotRequired[str]
    text: NotRequired[str]
    pair: NotRequired[str]
    label: str
    predicted: str
    probability: float
    top: dict[str, float]


class ClassificationMetric(RecordMetric):
    """Accuracy, calibration and confusion over all samples of all processes.

    `per_class`, `confusion`, `predictions` and `constant` refer to the samples of the last `compute`.

    Args:
        num_classes: Number of classes C.
    Attributes:
        ids: Names of the samples of the last `compute`.
        controls: Whether a control is right about each of these.
    """

    ids: list[str]
    controls: dict[str, np.ndarray]  # (B,)

    _labels: np.ndarray  # (B,)
    _classes: np.ndarray  # (B, top), the likeliest first
    _values: np.ndarray  # (B, top), their probabilities
    _texts: Sequence[Sequence[str] | None]

    def __init__(self, *, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes

    def update(
        self, ids: Sequence[str], probabilities: Tensor, labels: Tensor, texts: Sequence[Sequence[str]] | None = None
    ) -> None:
        """Adds some samples.

        Args:
            ids: Names of the samples, unique in the data set.
            probabilities: Probability of each class, summing to 1 for a sample.
            labels: The true classes.
            texts: The text of each sample, or its two texts, for its prediction; None for images.
        Shapes:
            probabilities (B, C), labels (B,)
        """
        # Stable, so that ties are ordered alike on every device.
        values, classes = probabilities.detach().float().sort(dim=-1, descending=True, stable=True)
        top = classes[:, :TOP].tolist(), values[:, :TOP].tolist()
        sample_texts = [None] * len(ids) if texts is None else map(list, texts)
        self.add(zip(ids, labels.tolist(), *top, sample_texts, strict=True))

    def compute(self) -> dict[str, float]:
        """The scores.

        ``accuracy`` is the share of samples whose likeliest class is the true one; ``top5`` the share in which it is
        among the five likeliest (with six classes or more); ``balanced_accuracy`` the mean of the accuracies of the
        classes that have samples; ``calibration_error`` the expected calibration error (Guo et al. 2017, equation 3):
        the mean distance of confidence and accuracy over 15 bins of equal width, weighted by their samples.

        Raises:
            UserError: Nothing was added.
        """
        self._read()
        right = self._classes[:, 0] == self._labels
        scores = {"accuracy": float(right.mean())}
        if self.num_classes > TOP:
            scores["top5"] = float((self._classes == self._labels[:, None]).any(1).mean())
        scores["balanced_accuracy"] = float(np.mean([value for value in self.per_class() if value is not None]))
        scores["calibration_error"] = calibration_error(self._values[:, 0], right)
        return scores

    def per_class(self) -> list[float | None]:
        """Returns the accuracy of each class; None for a class without samples."""
        matrix = self.confusion()
        counts = zip(matrix.diagonal().tolist(), matrix.sum(1).tolist(), strict=True)
        return [right / total if total else None for right, total in counts]

    def f1(self) -> list[float | None]:
        """Returns the F1 of each class; None for a class without samples."""
        matrix = self.confusion()
        counts = zip(matrix.diagonal().tolist(), matrix.sum(0).tolist(), matrix.sum(1).tolist(), strict=True)
        return [2 * right / (predicted + total) if total else None for right, predicted, total in counts]

    def confusion(self) -> np.ndarray:
        """Confusion matrix: counts by true class (rows) and predicted class (columns).

        Shapes:
            -> int64 (C, C)
        """
        cells = self._labels * self.num_classes + self._classes[:, 0]
        return np.bincount(cells, minlength=self.num_classes**2).reshape(self.num_classes, self.num_classes)

    def predictions(self, classes: Sequence[str]) -> list[ClassPrediction]:
        """Returns a record per sample, sorted by name: true class, likeliest with its probability, and the first five.

        Args:
            classes: The names of the classes.
        """
        predictions: list[ClassPrediction] = []
        columns = (self._labels.tolist(), self._classes.tolist(), self._values.tolist())
        for id, texts, label, top, values in zip(self.ids, self._texts, *columns, strict=True):
            prediction: ClassPrediction = {
                "label": classes[label],
                "predicted": classes[top[0]],
                "probability": values[0],
                "top": {classes[at]: value for at, value in zip(top, values, strict=True)},
            }
            if texts is None:
                predictions.append({"image": id, **prediction})
            elif len(texts) == 1:
                predictions.append({"id": id, "text": texts[0], **prediction})
            else:
                predictions.append({"id": id, "text": texts[0], "pair": texts[1], **prediction})
        return predictions

    def constant(self, counts: Sequence[int]) -> dict[str, float]:
        """Returns the control ``accuracy@constant``: the accuracy of always predicting train's most frequent class.

        Args:
            counts: Training samples of each class.
        """
        self.controls["constant"] = self._labels == int(np.argmax(counts))
        return {"accuracy@constant": float(self.controls["constant"].mean())}

    def scorers(self, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns scorers of the accuracy of the model and of a control in `controls`, and the number of samples."""
        sides = (self._classes[:, 0] == self._labels, self.controls[control])
        model, baseline = (mean_scorer(right[:, None].astype(np.float64)) for right in sides)
        return model, baseline, len(self.ids)

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns accuracy@low and accuracy@high: a 95% interval by bootstrap over samples."""
        right = (self._classes[:, :1] == self._labels[:, None]).astype(np.float64)
        return intervals(["accuracy"], mean_scorer(right), len(right), seed=seed)

    def _start(self) -> None:
        super()._start()
        self.ids, self.controls = [], {}
        self._labels = np.empty(0, dtype=np.int64)
        self._classes, self._values = np.empty((0, 1), dtype=np.int64), np.empty((0, 1))
        self._texts = ()

    def _read(self) -> None:
        rows = self.rows()
        if not rows:
            raise UserError("no sample to score: every sample is unreadable, or the split is empty", status=1)
        labels, classes, values, self._texts = zip(*rows.values(), strict=True)
        self.ids, self._labels = list(rows), np.array(labels)
        self._classes, self._values = np.array(classes), np.array(values)


def calibration_error(confidences: np.ndarray, right: np.ndarray, bins: int = BINS) -> float:
    """Returns the expected calibration error (Guo et al. 2017, equation 3).

    Args:
        confidences: Probability of each predicted class, in [0, 1].
        right: Whether it was the true one.
        bins: Number of bins of equal width; each includes its upper edge, not its lower.
    """
    places = np.clip(np.ceil(confidences * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(places, weights=right - confidences, minlength=bins)
    return float(np.abs(gaps).sum() / len(confidences))


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
        step = max(1, len(records) // SAMPLES)  # records are sorted, and so often by class
        for record in records[::step][:SAMPLES]:
            mark, name = "=" if record["predicted"] == record["label"] else " ", printable(find_name(record))
            line = f"{mark} {record['predicted']} {record['probability']:.3f}   true: {record['label']}   {name}"
            self.evaluation.samples.append({**record, "line": line})
        if final:
            results |= self.metric.constant(self.fields["labels"].counts("train"))  # type: ignore[attr-defined]
            results |= self.metric.intervals(seed=self.seed)
        return results

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int] | None:
        return self.metric.scorers(control) if control in self.metric.controls else None

    def predictions(self) -> list[ClassPrediction]:
        return self.metric.predictions(self.classes)

    def details(self) -> dict[str, JsonValue]:
        matrix = self.metric.confusion()
        per_class = dict(zip(self.classes, self.metric.per_class(), strict=True))
        return {"accuracy": per_class, "confusion": matrix.tolist(), "classes": self.classes}

    def report(self) -> list[Section]:
        """The confusion matrix, the scores of each class, the most confident mistakes, and random samples."""
        confusion = Confusion(self.metric.confusion().tolist(), self.classes)
        records = self.predictions()
        wrong = [record for record in records if record["predicted"] != record["label"]]
        wrong.sort(key=lambda record: -record["probability"])
        kinds = {
            "Most confident mistakes": wrong[:MAX_SAMPLES],
            "Random samples": pick_samples(records),
        }
        scores, rows = self.class_scores(), []
        for name, *values in zip(self.classes, *scores.values(), strict=True):
            rows.append([name, *("no samples" if value is None else f"{value:.1%}" for value in values)])
        table = Table(["class", *scores], rows)
        sections = [Section(title, [self.render_predictions(some)]) for title, some in kinds.items() if some]
        return [Section("Classes", [confusion, table]), *sections]

    def class_scores(self) -> dict[str, list[float | None]]:
        """Returns the scores of each class by their names in the report; None for a class without samples."""
        return {"accuracy": self.metric.per_class()}

    def render_predictions(self, records: Sequence[ClassPrediction]) -> Part:
        """Returns some predictions for the report."""
        raise TypeError(f"{type(self).__name__} shows no predictions")


def find_name(record: ClassPrediction) -> str:
    """Returns the name of a sample's image, or its texts."""
    if "image" in record:
        return record["image"]
    return f"{record['text']} | {record['pair']}" if "pair" in record else record["text"]
