"""Classifying images with a trained model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vlm.data.images.image import Preprocess
from vlm.inference.command_options import ClassOptions
from vlm.inference.predictor import BatchPredictor, ImagePredictor, Rows, check_outputs, normalized
from vlm.inference.ranking import Classes, ranked, ranked_record
from vlm.nn.precision import widest


@torch.inference_mode()
def class_probabilities(model: nn.Module, preprocess: Preprocess, pixels: Tensor) -> Tensor:
    """Returns class probabilities of preprocessed images; used by validation, test and `vlm classify`.

    Shapes:
        pixels uint8 (B, 3, H, W) -> (B, C), float64
    """
    # In float64 a very small probability is not rounded to 0, whose logarithm would be infinite.
    logits = model(normalized(model, preprocess, pixels))
    return logits.to(widest(logits.device)).softmax(-1)


class ImageClassifier(BatchPredictor, ImagePredictor):
    """A trained classifier, ready to use: the likeliest classes of each image; arguments as in Predictor."""

    task = "classification"
    result = Classes
    returns = "A Classes object"
    fields = ("image", "classes")
    options = ClassOptions

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.classes = ["".join(name) for name in about["classes"]]

    def check(self) -> None:
        blank = self.pixels(Image.new("RGB", (1, 1)))
        check_outputs(self.probabilities([blank]), len(self.classes), "classes")

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        yield from super().describe(about)
        yield f"classes     {', '.join(about['classes'])}"

    def predict(self, batch: Sequence[Tensor], options: ClassOptions) -> list[Classes]:
        return list(ranked(self.classes, self.probabilities(batch), top=options.top))

    def probabilities(self, pixels: Sequence[Tensor]) -> Tensor:
        """Returns the probabilities (B, C) of a batch of images from `pixels`."""
        return class_probabilities(self.model, self.preprocess, torch.stack(list(pixels)).to(self.device)).cpu()

    def record(self, source: Any, result: Classes, options: Any, *, form: str = "jsonl") -> Rows:
        return [ranked_record(form, {"image": self.name_of(source)}, result)]
