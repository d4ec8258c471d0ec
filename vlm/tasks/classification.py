"""Image classification: the model reads an image and says what class it is of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from vlm.data.batch import Batch
from vlm.data.images.image import Preprocess
from vlm.errors import Range, Share
from vlm.evaluation.metrics.classification import ClassificationMetric
from vlm.evaluation.report.sections import SHOWN, Card, Cards, Confusion, Section, Table, random_places
from vlm.inference.classification import class_probabilities
from vlm.models.classifier import Classifier
from vlm.models.flop import Work
from vlm.models.frozen_features import Features
from vlm.training.data_module import Data
from vlm.training.feature_cache import as_read
from vlm.training.losses import Term, class_loss
from vlm.training.mixing import Mixing
from vlm.training.optim import Optimization
from vlm.training.show import example_image, image_shape
from vlm.training.task import Task

SAMPLES = 32  # of an evaluation, to look at


class Classification(Task):
    """Trains by cross-entropy, with two images mixed if asked to.

    Args:
        model, optimization, seed, freeze: As in Task; the model is a Classifier.
        fields: images, and labels.
        label_smoothing: Share of the target spread evenly over the classes.
        mixup, cutmix: As in Mixing.
    """

    name = "classification"
    headlines = ("accuracy", "balanced_accuracy")
    curves = ("accuracy", "calibration_error")
    model: Classifier

    def __init__(
        self,
        *,
        model: Classifier,
        fields: Mapping[str, Any],
        seed: int,
        optimization: Optimization | None = None,
        freeze: Sequence[str] = (),
        label_smoothing: Share = 0.0,
        mixup: Annotated[float, Range(0)] = 0.0,
        cutmix: Annotated[float, Range(0)] = 0.0,
    ) -> None:
        super().__init__(model=model, fields=fields, optimization=optimization, seed=seed, freeze=freeze)
        self.classes, self.label_smoothing = list(fields["labels"].classes), label_smoothing
        self.mixing = Mixing(mixup=mixup, cutmix=cutmix, num_classes=len(self.classes))
        self.metric = ClassificationMetric(num_classes=len(self.classes))

    @property
    def preprocess(self) -> Preprocess:
        """Makes pixels of images, and normalises them."""
        return self.fields["images"].preprocess  # type: ignore[attr-defined]

    def work(self, batch: Batch) -> Work:
        return Work(images=len(batch.ids), kept=isinstance(batch["images"], Features))

    def loss(self, batch: Batch) -> dict[str, Term]:
        images, targets = self.mixing(as_read(batch["images"], self.preprocess), batch["labels"])
        return {"images": Term(*class_loss(self.model(images), targets, label_smoothing=self.label_smoothing))}

    def on_evaluation_start(self) -> None:
        super().on_evaluation_start()
        self.metric.reset()

    def evaluation_step(self, batch: Batch) -> None:
        self.unread += [sample.reason for sample in batch.bad]
        labels = batch["labels"]
        probabilities = class_probabilities(self.model, self.preprocess, batch["images"])
        picked = probabilities.gather(1, labels[:, None])
        self.add_loss({"images": Term(-picked.log().sum(), len(batch.ids))})
        self.metric.update(batch.ids, probabilities, labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluation_step(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluation_step(batch)

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        results = self.metric.compute()
        records = self.metric.predictions(self.classes)
        spread = records[:: max(1, len(records) // SAMPLES)]  # they are sorted, and so by class
        self.samples = [{**record, "line": _line(record)} for record in spread[:SAMPLES]]
        if final:
            results |= self.metric.constant(self.fields["labels"].counts("train"))  # type: ignore[attr-defined]
            results |= self.metric.intervals(seed=self.seed)
        return results

    def predictions(self) -> list[dict[str, Any]]:
        return self.metric.predictions(self.classes)

    def details(self) -> dict[str, Any]:
        matrix = self.metric.confusion()
        per_class = dict(zip(self.classes, self.metric.per_class(), strict=True))
        return {"accuracy": per_class, "confusion": matrix.tolist(), "classes": self.classes}

    def report(self) -> list[Section]:
        """The confusion matrix, the accuracy of each class, and the surest mistakes beside some samples at random."""
        records, shares = self.predictions(), zip(self.classes, self.metric.per_class(), strict=True)
        rows = [(name, "no samples" if share is None else f"{share:.1%}") for name, share in shares]
        confusion = Confusion(self.metric.confusion().tolist(), self.classes)
        wrong = [record for record in records if record["predicted"] != record["label"]]
        wrong.sort(key=lambda record: -record["probability"])
        random = [records[at] for at in random_places(len(records))]
        kinds = {"Surest mistakes": wrong[:SHOWN], "Random samples": random}
        cards = [Section(title, [Cards(list(map(_card, kind)))]) for title, kind in kinds.items() if kind]
        return [Section("Classes", [confusion, Table(["class", "accuracy"], rows)]), *cards]

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        names = ", ".join(self.classes[label] for label in batch["labels"][:8])
        return [f"batch       {image_shape(batch['images'])}", f"sample      {batch.ids[0]}", f"  classes   {names}"]

    def example(self, data: Data, folder: Path) -> str:
        return f"vlm classify {example_image(data, folder)}"


def _line(record: dict[str, Any]) -> str:
    mark = "=" if record["predicted"] == record["label"] else " "
    return f"{mark} {record['predicted']} {record['probability']:.3f}   true: {record['label']}   {record['image']}"


def _card(record: dict[str, Any]) -> Card:
    true = "right" if record["predicted"] == record["label"] else f"true: {record['label']}"
    text = f"{record['predicted']} {record['probability']:.0%}"
    return Card(image=record["image"], text=text, lines=[true, record["image"]])
