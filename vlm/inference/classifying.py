"""Classifying images with a trained model: load, preprocess, predict, format."""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor, nn

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.verify import refusing
from vlm.data.images.image import Preprocess
from vlm.inference.inputs import read_images
from vlm.inference.loading import check_outputs, normalized, read_for
from vlm.inference.output import Records
from vlm.nn.step.packed import pack


@torch.inference_mode()
def class_probabilities(model: nn.Module, preprocess: Preprocess, pixels: Tensor) -> Tensor:
    """Probabilities of preprocessed images; validation, evaluation and `vlm classify` all go through here.

    Shapes:
        pixels uint8 (B, 3, H, W) -> (B, C), float64
    """
    # In float64 the probability of an improbable class is not yet 0, whose logarithm a loss could not take.
    return model(normalized(model, preprocess, pixels)).double().softmax(-1)


class ImageClassifier:
    """A trained classifier, ready to use.

    Args:
        path: The checkpoint.
        device: Where to run.
        dtype: Of weights and states.
        trust: A package of the user's own whose model classes may be built.
    Raises:
        UserError: The checkpoint holds no classifier.
    """

    def __init__(
        self,
        path: str,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        trust: str | None = None,
    ) -> None:
        loaded = read_for("classification", path)
        about = loaded["vlm"]
        self.device = device
        with refusing(path):
            self.preprocess = Preprocess.from_state(about["preprocess"])
            self.classes = ["".join(name) for name in about["classes"]]
            self.model = ckpt.load_model(loaded, trust=trust).to(device, dtype)
            blank = self.pixels(Image.new("RGB", (1, 1)))
            check_outputs(self.classify([blank]), len(self.classes), "classes")

    def pixels(self, image: Image.Image) -> Tensor:
        """An image as the model reads it, uint8 (3, H, W)."""
        return self.preprocess(image)

    def classify(self, pixels: Sequence[Tensor]) -> Tensor:
        """Probabilities (B, C) of a batch of images that `pixels` made."""
        return class_probabilities(self.model, self.preprocess, torch.stack(list(pixels)).to(self.device)).cpu()


def classify_files(
    classifier: ImageClassifier, paths: Sequence[str], records: Records, *, batch_size: int, top: int, workers: int = 0
) -> int:
    """Classifies image files in batches and writes a record for each; returns the exit status.

    A file that cannot be read is named on stderr and does not keep the others from being classified.

    Args:
        top: How many classes are told of an image.
        workers: As in `read_images`.
    """
    failed = 0
    pack(classifier.model)
    for good, pixels, bad in read_images(paths, classifier.pixels, batch_size=batch_size, workers=workers):
        failed += bad
        if not good:
            continue
        values, places = classifier.classify(pixels).topk(min(top, len(classifier.classes)))
        for path, row, at in zip(good, values.tolist(), places.tolist(), strict=True):
            found = [(classifier.classes[place], value) for place, value in zip(at, row, strict=True)]
            records.write(_record(records.form, path, found))
    return 1 if failed else 0


def _record(form: str, path: str, found: list[tuple[str, float]]) -> dict:
    name, probability = found[0]
    if form == "text":
        return {"image": path, "classes": "  ".join(f"{name} {value:.4f}" for name, value in found)}
    record: dict = {"image": path, "class": name, "probability": probability}
    if form == "jsonl":
        return {**record, "top": dict(found)}
    for rank, (name, value) in enumerate(found[1:], start=2):
        record |= {f"class_{rank}": name, f"probability_{rank}": value}
    return record
