"""Training augmentation for classification, which may be stronger than captions allow."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np
import torch
from PIL import Image

from vlm.data.images.augment import Augment, AugmentOptions
from vlm.data.images.resize import PAD_COLOR, to_tensor
from vlm.errors import Count, Range, Share, UserError
from vlm.randomness import key as hashed
from vlm.randomness import numpy_rng

POLICIES = ("randaugment", "autoaugment", "autoaugment_cifar10", "trivialaugment")
MAX_MAGNITUDE = 30  # torchvision has 31 levels of strength

# Area of an erased rectangle, as a share of the image, and its minimum ratio of height to width (Zhong et al. 2020).
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = 0.3
ERASE_TRIES = 10


class ClassAugment(Augment):
    """`Augment`, then a shift, a policy and random erasing, all determined by the sample's key.

    Args:
        options: See Augment. Common for photos: ``min_scale`` 0.08 to 0.35, ``min_ratio`` 0.75.
        pad_crop: Maximum shift in pixels in each direction, filled with black: torchvision's
            RandomCrop(image_size, padding=pad_crop), common for tiny images (He et al. 2016, section 4.2: 4 of 32).
        policy: ``randaugment`` (Cubuk et al. 2020), ``autoaugment`` for ImageNet or ``autoaugment_cifar10`` (Cubuk et
            al. 2019), ``trivialaugment`` (Müller & Hutter 2021); None for none. They rotate, shear and change colours,
            so do not use them for classes that differ in these.
        num_ops: Number of RandAugment's operations per image.
        magnitude: Strength of RandAugment's operations, 0 to 30.
        erase: Share of images with a rectangle replaced by noise (Zhong et al. 2020).
    Shapes:
        PIL image -> uint8 (3, H, W)
    Raises:
        UserError: As in Augment; or the policy is unknown, or the shift is as large as the image.
    """

    def __init__(
        self,
        *,
        pad_crop: Annotated[int, Range(0)] = 0,
        policy: str | None = None,
        num_ops: Count = 2,
        magnitude: Annotated[int, Range(0, MAX_MAGNITUDE)] = 9,
        erase: Share = 0.0,
        **options: Unpack[AugmentOptions],
    ) -> None:
        super().__init__(**options)
        if policy is not None and policy not in POLICIES:
            raise UserError(f"policy={policy!r} is unknown; choose one of {', '.join(POLICIES)}, or null for none")
        if pad_crop >= min(self.image_size):
            raise UserError(f"pad_crop={pad_crop} is invalid; give 0 (off) to below image_size={min(self.image_size)}")
        self.pad_crop, self.policy, self.erase = pad_crop, policy, erase
        self._operate = _policy(policy, num_ops, magnitude) if policy else None

    OFF: ClassVar[dict[str, Any]] = {**Augment.OFF, "pad_crop": 0, "policy": None, "erase": 0}

    def __call__(self, image: Image.Image, key: tuple[int | str, ...]) -> torch.Tensor:
        image = self.picture(image, key)
        if self.pad_crop:
            image = _shift(image, self.shift(key))
        if self._operate:
            with _seeded(hashed("policy", *key)):
                image = self._operate(image)
        pixels = to_tensor(image)
        if self.erase:
            rng = numpy_rng("erase", *key)
            if (place := self.rectangle(rng)) is not None:
                top, left, h, w = place
                noise = torch.from_numpy(rng.integers(0, 256, (3, h, w), dtype=np.uint8))
                pixels[:, top : top + h, left : left + w] = noise
        return pixels

    def shift(self, key: tuple[int | str, ...]) -> tuple[int, int]:
        """The shift of an image, in pixels to the right and down."""
        x, y = numpy_rng("shift", *key).integers(-self.pad_crop, self.pad_crop, 2, endpoint=True).tolist()
        return x, y

    def rectangle(self, rng: np.random.Generator) -> tuple[int, int, int, int] | None:
        """Top, left, height and width of a rectangle to erase; None if none is drawn, or none fits."""
        if rng.random() >= self.erase:
            return None
        height, width = self.image_size
        for _ in range(ERASE_TRIES):
            area = rng.uniform(*ERASED_AREA) * height * width
            ratio = ERASED_RATIO ** rng.uniform(-1, 1)  # log-uniform: tall and wide rectangles are equally likely
            h, w = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 0 < h < height and 0 < w < width:
                return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
        return None


def _policy(name: str, num_ops: int, magnitude: int) -> Callable[[Image.Image], Image.Image]:
    """A torchvision policy for PIL images; on uint8 tensors it is about 1.5 times as slow."""
    from torchvision.transforms import v2  # takes a second to import

    look: dict[str, Any] = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": list(PAD_COLOR)}
    policies = {
        "randaugment": partial(v2.RandAugment, num_ops=num_ops, magnitude=magnitude),
        "autoaugment": partial(v2.AutoAugment, policy=v2.AutoAugmentPolicy.IMAGENET),
        "autoaugment_cifar10": partial(v2.AutoAugment, policy=v2.AutoAugmentPolicy.CIFAR10),
        "trivialaugment": v2.TrivialAugmentWide,
    }
    return policies[name](**look)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds torchvision's random choices and restores torch's generator afterwards.

    It seeds the CPU's generator only: `torch.manual_seed` would also change the GPU's, which dropout uses.
    """
    generator = torch.default_generator
    state = generator.get_state()
    try:
        generator.manual_seed(seed)
        yield
    finally:
        generator.set_state(state)


def _shift(image: Image.Image, by: tuple[int, int]) -> Image.Image:
    canvas = Image.new("RGB", image.size)
    canvas.paste(image, by)
    return canvas
