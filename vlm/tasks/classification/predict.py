"""Classifying images with a trained model: load, preprocess, predict, format; the command `classify`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
from PIL import Image
from torch import Tensor, nn

from vlm.data.images.image import Preprocess
from vlm.errors import Count
from vlm.inference.image_predictor import ImagePredictor
from vlm.inference.inputs import default_workers, find_images, image_batches, read_images, several_images
from vlm.inference.options import Images, ModelOptions, Option, Workers, choose_workers
from vlm.inference.predictor import check_outputs, normalized
from vlm.inference.ranking import Classes, ranked, ranked_record
from vlm.io.output import Output, Records
from vlm.nn.precision import widest


@torch.inference_mode()
def class_probabilities(model: nn.Module, preprocess: Preprocess, pixels: Tensor) -> Tensor:
    """Probabilities of preprocessed images; validation, evaluation and `vlm classify` all go through here.

    Shapes:
        pixels uint8 (B, 3, H, W) -> (B, C), float64
    """
    # In float64 the probability of an improbable class is not yet 0, whose logarithm a loss could not take.
    logits = model(normalized(model, preprocess, pixels))
    return logits.to(widest(logits.device)).softmax(-1)


class ImageClassifier(ImagePredictor):
    """A trained classifier, ready to use; arguments as in Predictor."""

    task = "classification"
    fields = ("image", "classes")

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.classes = ["".join(name) for name in about["classes"]]

    def check(self) -> None:
        blank = self.pixels(Image.new("RGB", (1, 1)))
        check_outputs(self.classify([blank]), len(self.classes), "classes")

    @staticmethod
    def inputs(arguments: Sequence[str]) -> list[str]:
        return find_images(arguments)

    def predict(self, inputs: Sequence[str], records: Records, *, batch_size: int) -> int:
        return classify_files(self, inputs, records, batch_size=batch_size, top=1, workers=default_workers())

    @classmethod
    def several(cls, inputs: Any) -> tuple[list[Any], bool]:
        return several_images(inputs)

    def use(
        self, inputs: Sequence[Any], *, top: Count = 1, batch_size: Count = 32, workers: Workers = None
    ) -> list[Classes]:
        """The likeliest classes of each image.

        Args:
            inputs: Paths, images of Pillow, or arrays (H, W, 3).
            top: Classes of an image.
            batch_size: Images at a time.
            workers: Threads that read images ahead; by default one a CPU, up to 8.
        """
        batches = image_batches(inputs, self.pixels, batch_size=batch_size, workers=choose_workers(workers))
        return [one for batch in batches for one in ranked(self.classes, self.classify(batch), top=top)]

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        yield from super().describe(about)
        yield f"classes     {', '.join(about['classes'])}"

    def classify(self, pixels: Sequence[Tensor]) -> Tensor:
        """Probabilities (B, C) of a batch of images that `pixels` made."""
        return class_probabilities(self.model, self.preprocess, torch.stack(list(pixels)).to(self.device)).cpu()


def classify_files(
    classifier: ImageClassifier, paths: Sequence[str], records: Records, *, batch_size: int, top: int, workers: int = 0
) -> int:
    """Classifies image files in batches and writes a record for each; returns the exit status.

    A file that cannot be read is named on stderr and does not keep the others from being classified.

    Args:
        top: Classes of an image that are written, the most probable first.
        workers: As in `read_images`.
    """
    failed = 0
    classifier.prepack(batch_size)
    for good, pixels, bad in read_images(paths, classifier.pixels, batch_size=batch_size, workers=workers):
        failed += bad
        if not good:
            continue
        rankings = ranked(classifier.classes, classifier.classify(pixels), top=top)
        for path, one in zip(good, rankings, strict=True):
            records.write(ranked_record(records.form, {"image": path}, one))
    return 1 if failed else 0


def command(
    images: Images,
    model: ModelOptions,
    top: Annotated[int, Option("Classes of an input that are written.", least=1)] = 1,
    workers: Workers = None,
) -> int:
    """Classifies images as the options say; returns the exit status."""
    paths = find_images(images)
    output = Output(model.out, inputs=[*paths, model.checkpoint])
    records = Records(form=model.form, fields=ImageClassifier.fields, output=output)
    classifier = model.load(ImageClassifier)
    options: Any = {"batch_size": model.batch_size, "top": top, "workers": choose_workers(workers)}
    with output:
        return classify_files(classifier, paths, records, **options)
