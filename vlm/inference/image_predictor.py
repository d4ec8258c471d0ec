"""Predictors whose models read images."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor

from vlm.data.images.image import Preprocess
from vlm.inference.arguments import Arguments, ImageArguments
from vlm.inference.info import preprocess_line
from vlm.inference.inputs import open_image
from vlm.inference.options import ImageOptions
from vlm.inference.predictor import Predictor


class ImagePredictor(Predictor):
    """A predictor that preprocesses images as in training; arguments as in Predictor."""

    options: ClassVar[Any] = ImageOptions
    arguments: ClassVar[type[Arguments]] = ImageArguments

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.preprocess = Preprocess.from_state(about["preprocess"])

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        yield from super().describe(about)
        yield preprocess_line(about["preprocess"])

    def prepare(self, source: Any, options: Any) -> Any:
        return self.pixels(open_image(source))

    def pixels(self, image: Image.Image | Tensor) -> Tensor:
        """Returns an image as the model reads it, uint8 (3, H, W); tensors are returned unchanged."""
        return image if isinstance(image, Tensor) else self.preprocess(image)


def image_keys(pixels: Sequence[Tensor]) -> list[str]:
    """Returns keys of images that depend only on their pixels."""
    return [blake2b(image.cpu().numpy().tobytes(), digest_size=16).hexdigest() for image in pixels]
