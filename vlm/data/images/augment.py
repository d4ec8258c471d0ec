"""Training augmentation that keeps captions true: moderate crops and changes of light, all off by default."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NotRequired, TypedDict

import numpy as np
import torch
from PIL import Image

from vlm.data.images.image import to_rgb
from vlm.data.images.resize import MIN_CROP, Box, check_geometry, resize_box, resize_to_tensor, to_tensor
from vlm.data.images.view import View
from vlm.errors import Range, Rate
from vlm.nn.image_size import ImageSize
from vlm.randomness import numpy_rng


@dataclass(frozen=True)
class AugmentParams:
    """Augmentation parameters of one image.

    Args:
        box: Region to crop; None for the evaluation crop.
        flip: Whether to mirror the image.
        brightness, contrast: Factors.
    """

    box: Box | None
    flip: bool
    brightness: float
    contrast: float


class AugmentOptions(TypedDict):
    """Arguments of Augment, which documents them and has their defaults."""

    image_size: ImageSize
    resize: NotRequired[str | None]
    interpolation: NotRequired[str | None]
    crop: NotRequired[Annotated[float, Range(MIN_CROP, 1)] | None]
    min_scale: NotRequired[Annotated[float, Range(above=0, high=1)]]
    min_ratio: NotRequired[Annotated[float, Range(above=0, high=1)]]
    horizontal_flip: NotRequired[bool]
    color_jitter: NotRequired[Rate]


class Augment:
    """Random resized crop, flip and colour jitter, determined by the sample's key; with all off, it is `Preprocess`.

    The crop follows Szegedy et al. 2015 (Inception, "Training Methodology"), except that its area is relative to the
    evaluation view: the largest rectangle of its shape for ``crop``, the whole image for ``squash`` and ``pad``.

    Args:
        image_size: Height and width that the model sees; one number for a square.
        resize: ``crop``, ``squash`` or ``pad``, as in evaluation.
        interpolation, crop: As in evaluation.
        min_scale: Minimum share of the area that a crop keeps, in (0, 1]. A small one may crop what captions mention.
        min_ratio: Minimum aspect ratio of a crop, relative to the uncropped view, in (0, 1].
        horizontal_flip: Whether to mirror half of the images.
        color_jitter: Maximum change of brightness and contrast, in [0, 1): 0.2 gives factors of 0.8 to 1.2.
    Shapes:
        PIL image -> uint8 (3, H, W)
    Raises:
        UserError: Size, resize, interpolation or crop is invalid.
    """

    def __init__(
        self,
        *,
        image_size: ImageSize,
        resize: str | None = None,
        interpolation: str | None = None,
        crop: Annotated[float, Range(MIN_CROP, 1)] | None = None,
        min_scale: Annotated[float, Range(above=0, high=1)] = 1.0,
        min_ratio: Annotated[float, Range(above=0, high=1)] = 1.0,
        horizontal_flip: bool = False,
        color_jitter: Rate = 0.0,
    ) -> None:
        self.resize = "crop" if resize is None else resize
        self.interpolation = "bicubic" if interpolation is None else interpolation
        self.crop = 1.0 if crop is None else crop
        self.image_size = check_geometry(image_size, self.resize, self.interpolation, self.crop)
        self.min_scale, self.min_ratio = min_scale, min_ratio
        self.horizontal_flip, self.color_jitter = horizontal_flip, color_jitter

    OFF: ClassVar[dict[str, Any]] = {"min_scale": 1, "min_ratio": 1, "horizontal_flip": False, "color_jitter": 0}

    @property
    def enabled_options(self) -> list[str]:
        """The parts that are on, as NAME=VALUE; empty if the result does not depend on the key."""
        values = {name: getattr(self, name) for name in self.OFF}
        return [f"{name}={value}" for name, value in values.items() if value != self.OFF[name]]

    def __call__(self, image: Image.Image, key: tuple[int | str, ...]) -> torch.Tensor:
        """The augmented image. Equal keys, such as (seed, epoch, index), give equal results in any process."""
        if not self.enabled_options:
            return resize_to_tensor(to_rgb(image), self.image_size, self.resize, self.interpolation, self.crop)
        return to_tensor(self.augment_image(image, key))

    def augment_image(self, image: Image.Image, key: tuple[int | str, ...]) -> Image.Image:
        """The augmented image as a PIL image, for subclasses."""
        image = to_rgb(image)
        params = self.draw_params(image.size, key)
        if params.box is None:
            pixels = resize_to_tensor(image, self.image_size, self.resize, self.interpolation, self.crop)
            image = Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
        else:
            image = resize_box(image, params.box, self.image_size, self.resize == "pad", self.interpolation)
        if params.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.color_jitter:
            grey = np.asarray(image.convert("L")).mean() * params.brightness
            table = (np.arange(256) * params.brightness - grey) * params.contrast + grey
            image = image.point(np.rint(table).clip(0, 255).astype(int).tolist() * 3)
        return image

    def draw_params(self, size: tuple[int, int], key: tuple[int | str, ...]) -> AugmentParams:
        """The augmentation parameters for an image of a width and height."""
        # All numbers are drawn, so that turning on one augmentation does not change the others.
        area, ratio, left, top, flip, brightness, contrast = numpy_rng(*key).random(7).tolist()
        crops, low = not self.min_scale == self.min_ratio == 1, 1 - self.color_jitter
        return AugmentParams(
            box=self._box(size, area, ratio, left, top) if crops else None,
            flip=self.horizontal_flip and flip < 0.5,
            brightness=low + 2 * self.color_jitter * brightness,
            contrast=low + 2 * self.color_jitter * contrast,
        )

    def view(self, size: tuple[int, int], key: tuple[int | str, ...]) -> View:
        """Where the pixels of an image of this width and height are in the augmented image."""
        params = self.draw_params(size, key)
        if params.box is None:
            view = View.of_evaluation(size, self.image_size, self.resize, self.crop)
        else:
            view = View.of_crop(params.box, self.image_size, pad=self.resize == "pad")
        return view._replace(mirrored=params.flip)

    def _box(self, size: tuple[int, int], area: float, ratio: float, left: float, top: float) -> Box:
        """The region to crop; all four numbers are uniform in [0, 1)."""
        base: tuple[float, float] = size
        if self.resize.startswith("crop"):
            height, width = self.image_size
            base = min(size[0], size[1] * width / height), min(size[1], size[0] * height / width)
        scale = (self.min_scale + (1 - self.min_scale) * area) ** 0.5
        stretch = self.min_ratio ** (ratio - 0.5)  # log-uniform: wide and tall crops are equally likely
        width = min(base[0] * scale * stretch, size[0])
        height = min(base[1] * scale / stretch, size[1])
        x, y = left * (size[0] - width), top * (size[1] - height)
        return x, y, min(x + width, size[0]), min(y + height, size[1])
