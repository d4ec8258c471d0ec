"""Image classification."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Unpack

from torch import Tensor

from vlm.data.batch import Batch
from vlm.errors import Range
from vlm.evaluation.report.sections import Card, Cards
from vlm.models.classifier import Classifier
from vlm.models.flop import Work
from vlm.models.frozen_features import Features
from vlm.tasks.classification.predict import class_probabilities
from vlm.tasks.shared.class_task import ClassTask
from vlm.tasks.shared.show import example_image, image_shape
from vlm.training.data_module import Data
from vlm.training.feature_cache import as_read
from vlm.training.step.losses import Term, class_loss
from vlm.training.step.mixing import Mixing
from vlm.training.step.task import TaskOptions


class Classification(ClassTask):
    """Trains by cross-entropy, optionally with MixUp and CutMix.

    Args:
        model, options: As in Task; the model is a Classifier.
        fields: images, and labels.
        mixup, cutmix: As in Mixing.
    """

    name = "classification"
    model: Classifier

    def __init__(
        self,
        *,
        model: Classifier,
        mixup: Annotated[float, Range(0)] = 0.0,
        cutmix: Annotated[float, Range(0)] = 0.0,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(model=model, **options)
        self.mixing = Mixing(mixup=mixup, cutmix=cutmix, num_classes=len(self.classes))

    def work(self, batch: Batch) -> Work:
        return Work(images=len(batch.ids), kept=isinstance(batch["images"], Features))

    def loss(self, batch: Batch) -> dict[str, Term]:
        images, targets = self.mixing(as_read(batch["images"], self.preprocess), batch["labels"])
        return {"images": Term(*class_loss(self.model(images), targets, label_smoothing=self.label_smoothing))}

    def probabilities(self, batch: Batch) -> Tensor:
        return class_probabilities(self.model, self.preprocess, batch["images"])

    def shown(self, records: Sequence[Mapping[str, Any]]) -> Cards:
        return Cards(list(map(_card, records)))

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        names = ", ".join(self.classes[label] for label in batch["labels"][:8])
        return [f"batch       {image_shape(batch['images'])}", f"sample      {batch.ids[0]}", f"  classes   {names}"]

    def example(self, data: Data, folder: Path) -> str:
        return f"vlm classify {example_image(data, folder)}"


def _card(record: Mapping[str, Any]) -> Card:
    true = "right" if record["predicted"] == record["label"] else f"true: {record['label']}"
    text = f"{record['predicted']} {record['probability']:.0%}"
    return Card(image=record["image"], text=text, lines=[true, record["image"]])
