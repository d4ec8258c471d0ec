"""Classifying images with a trained model, and the base of predictors that choose among classes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from PIL import Image
from torch import Tensor, nn

from vlm.checkpoint.stored import Metadata
from vlm.data.images.image import Preprocess
from vlm.inference.command_options import ClassOptions
from vlm.inference.inputs import ImageSource
from vlm.inference.predictor import (
    BatchPredictor,
    ImagePredictor,
    Prepared,
    Result,
    Rows,
    Source,
    Stored,
    TaskOptions,
    check_outputs,
    normalize_pixels,
)
from vlm.io.output import Record, Value
from vlm.nn.device import widest_float


@dataclass(frozen=True)
class Classes:
    """The likeliest classes of an input.

    Args:
        name: The likeliest class.
        probability: Its probability.
        top: Names and probabilities, the likeliest first; two classes may share a name.
    """

    name: str
    probability: float
    top: tuple[tuple[str, float], ...]


def rank_classes(classes: Sequence[str], probabilities: Tensor, *, top: int) -> Iterator[Classes]:
    """Yields the most probable classes of each input of a batch.

    Shapes:
        probabilities (B, C)
    """
    values, places = probabilities.topk(min(top, len(classes)))
    for row, at in zip(values.tolist(), places.tolist(), strict=True):
        pairs = tuple((classes[place], value) for place, value in zip(at, row, strict=True))
        yield Classes(*pairs[0], pairs)


def classes_record(form: str, head: Record, best: Classes) -> Record:
    """Returns the record of an input and its classes; JSON sums the probabilities of classes with the same name."""
    if form == "text":
        return {**head, "classes": "  ".join(f"{name} {value:.4f}" for name, value in best.top)}
    record: dict[str, Value] = {**head, "class": best.name, "probability": best.probability}
    if form == "jsonl":
        top: dict[str, float] = {}
        for name, value in best.top:
            top[name] = top.get(name, 0.0) + value
        return {**record, "top": top}
    for rank, (name, value) in enumerate(best.top[1:], start=2):
        record |= {f"class_{rank}": name, f"probability_{rank}": value}
    return record


class ClassPredictor(BatchPredictor[Source, Prepared, Result, TaskOptions]):
    """A predictor of classes; arguments as in Predictor.

    Attributes:
        classes: Names of the classes, in the order of the model's outputs.
        class_heading: Heading of the classes in `vlm info`.
    """

    stored: ClassVar[Stored] = {"classes": lambda stored: ["".join(name) for name in stored]}
    classes: list[str]
    class_heading: ClassVar[str] = "classes"

    @classmethod
    def describe(cls, about: Metadata) -> Iterator[str]:
        yield from super().describe(about)
        yield cls.describe_classes(about)

    @classmethod
    def describe_classes(cls, about: Metadata) -> str:
        """Returns a line of `vlm info` on the classes."""
        return f"{cls.class_heading:<12}{', '.join(cast(Sequence[str], about['classes']))}"

    def check_classes(self, probabilities: Tensor) -> None:
        """Checks that the model has one output per class.

        Raises:
            UserError: The numbers differ.
        """
        check_outputs(probabilities, len(self.classes), "classes")


@torch.inference_mode()
def class_probabilities(model: nn.Module, preprocess: Preprocess, pixels: Tensor) -> Tensor:
    """Returns class probabilities of preprocessed images; used by validation, test and `vlm classify`.

    Shapes:
        pixels uint8 (B, 3, H, W) -> (B, C), float64
    """
    # In float64 a very small probability is not rounded to 0, whose logarithm would be infinite.
    logits = model(normalize_pixels(model, preprocess, pixels))
    return logits.to(widest_float(logits.device)).softmax(-1)


class ImageClassifier(ClassPredictor[ImageSource, Tensor, Classes, ClassOptions], ImagePredictor):
    """A trained classifier, ready to use: the likeliest classes of each image; arguments as in Predictor."""

    task = "classification"
    result = Classes
    returns = "A Classes object"
    fields = ("image", "classes")
    options = ClassOptions

    def check(self) -> None:
        self.check_classes(self.probabilities([self.pixels(Image.new("RGB", (1, 1)))]))

    def predict(self, batch: Sequence[Tensor], options: ClassOptions) -> list[Classes]:
        return list(rank_classes(self.classes, self.probabilities(batch), top=options.top))

    def probabilities(self, pixels: Sequence[Tensor]) -> Tensor:
        """Returns the probabilities (B, C) of a batch of images from `pixels`."""
        return class_probabilities(self.model, self.preprocess, torch.stack(list(pixels)).to(self.device)).cpu()

    def record(self, source: ImageSource, result: Classes, options: ClassOptions, *, form: str = "jsonl") -> Rows:
        return [classes_record(form, {"image": self.name_of(source)}, result)]
