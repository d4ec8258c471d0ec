"""Image classification, also of mixed images (MixUp, CutMix)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Unpack

import torch
from torch import Tensor

from vlm.data.batch import Batch
from vlm.errors import Range, UserError
from vlm.evaluation.report.content import Card, Cards
from vlm.models.classifier import Classifier
from vlm.models.context import Features
from vlm.models.flop import Work
from vlm.tasks.classification.predict import class_probabilities
from vlm.tasks.shared.classes import ClassPrediction, ClassTask
from vlm.tasks.shared.distillation import ClassDistillation, DistilledTask, Teacher
from vlm.tasks.shared.show import example_image, image_shape
from vlm.training.data_module import Data
from vlm.training.image_cache import as_read
from vlm.training.step.losses import Term, class_loss
from vlm.training.step.task import TaskOptions


class Mixing:
    """Mixes each image of a batch with another one, and their labels alike, by torchvision's transforms.

    Partners and shares are drawn from torch's own generator, which a training step seeds by its keys.

    Args:
        mixup: Alpha of MixUp (Zhang et al. 2018), which blends two images; 0 is off.
        cutmix: Alpha of CutMix (Yun et al. 2019), which pastes a box of one into the other; 0 is off. With both, one is
            drawn for each batch.
        num_classes: Number C of classes.
    Shapes:
        images (B, 3, H, W), labels (B,) -> images, and labels or the share of each class (B, C)
        features are returned unchanged if nothing is mixed
    Raises:
        UserError: An alpha is negative.
    """

    def __init__(self, *, mixup: float, cutmix: float, num_classes: int) -> None:
        from torchvision.transforms import v2

        for name, alpha in (("mixup", mixup), ("cutmix", cutmix)):
            if alpha < 0:
                raise UserError(f"task.{name}: {alpha:g} is below 0; give the alpha of a beta distribution, or 0")
        kinds: list[tuple[Callable[..., Callable], float]] = [(v2.MixUp, mixup), (v2.CutMix, cutmix)]
        self.mixup, self.cutmix = mixup, cutmix
        self.choices = [kind(alpha=alpha, num_classes=num_classes) for kind, alpha in kinds if alpha]

    def __call__(self, images: Tensor | Features, labels: Tensor) -> tuple[Tensor | Features, Tensor]:
        if not self.choices or not len(labels):
            return images, labels
        return self.choices[int(torch.randint(len(self.choices), ()))](images, labels)


class Classification(DistilledTask, ClassTask):
    """Trains by cross-entropy, optionally with MixUp and CutMix.

    Args:
        model, options: As in Task; the model is a Classifier.
        fields: images, and labels.
        mixup, cutmix: As in Mixing.
        teacher: A model whose predictions the trained model learns; None for none.
    """

    name = "classification"
    model: Classifier

    def __init__(
        self,
        *,
        model: Classifier,
        mixup: Annotated[float, Range(0)] = 0.0,
        cutmix: Annotated[float, Range(0)] = 0.0,
        teacher: Teacher | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(model=model, **options)
        self.mixing = Mixing(mixup=mixup, cutmix=cutmix, num_classes=len(self.classes))
        if teacher is not None and teacher.path is not None:
            self.distillation = ClassDistillation(self, Classifier, teacher, lambda model, batch, images: model(images))

    def work(self, batch: Batch) -> Work:
        return Work(images=len(batch.ids), cached=isinstance(batch["images"], Features))

    def loss(self, batch: Batch) -> dict[str, Term]:
        images, targets = self.mixing(as_read(batch["images"], self.preprocess), batch["labels"])
        logits = self.model(images)
        terms = {"images": Term(*class_loss(logits, targets, label_smoothing=self.label_smoothing))}
        if self.distillation is None:
            return terms
        assert isinstance(images, Tensor)
        return self.distillation.terms(batch, terms, logits, images)

    def counts(self, batch: Batch) -> dict[str, int] | None:
        return self.distilled_counts(batch, "images", len(batch.ids))

    def probabilities(self, batch: Batch) -> Tensor:
        return class_probabilities(self.model, self.preprocess, batch["images"])

    def render_predictions(self, records: Sequence[ClassPrediction]) -> Cards:
        cards = []
        for record in records:
            true = "right" if record["predicted"] == record["label"] else f"true: {record['label']}"
            text = f"{record['predicted']} {record['probability']:.0%}"
            cards.append(Card(image=record["image"], text=text, lines=[true, record["image"]]))
        return Cards(cards)

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        names = ", ".join(self.classes[label] for label in batch["labels"][:8])
        return [f"batch       {image_shape(batch['images'])}", f"sample      {batch.ids[0]}", f"  classes   {names}"]

    def example(self, data: Data, folder: Path) -> str:
        return f"vlm classify {example_image(data, folder)}"
