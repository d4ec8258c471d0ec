"""Training augmentation for classification, stronger than captions allow; also of a batch on the device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vlm.data.images.augment import Augment, AugmentOptions
from vlm.data.images.resize import PAD_COLOR, to_tensor
from vlm.errors import Count, Range, Share, UserError
from vlm.randomness import key as hash_key
from vlm.randomness import numpy_rng

POLICIES = ("randaugment", "autoaugment", "autoaugment_cifar10", "trivialaugment")
MAX_MAGNITUDE = 30  # torchvision has 31 levels of strength

# Area of an erased rectangle, as a share of the image, and its minimum ratio of height to width (Zhong et al. 2020).
ERASE_AREA = (0.02, 1 / 3)
ERASE_RATIO = 0.3
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
        image = self.augment_image(image, key)
        if self.pad_crop:
            canvas = Image.new("RGB", image.size)
            canvas.paste(image, self.draw_shift(key))
            image = canvas
        if self._operate:
            with _fixed_seed(hash_key("policy", *key)):
                image = self._operate(image)
        pixels = to_tensor(image)
        if self.erase:
            rng = numpy_rng("erase", *key)
            if (place := self.draw_rectangle(rng)) is not None:
                top, left, h, w = place
                noise = torch.from_numpy(rng.integers(0, 256, (3, h, w), dtype=np.uint8))
                pixels[:, top : top + h, left : left + w] = noise
        return pixels

    def draw_shift(self, key: tuple[int | str, ...]) -> tuple[int, int]:
        """The shift of an image, in pixels to the right and down."""
        x, y = numpy_rng("shift", *key).integers(-self.pad_crop, self.pad_crop, 2, endpoint=True).tolist()
        return x, y

    def draw_rectangle(self, rng: np.random.Generator) -> tuple[int, int, int, int] | None:
        """Top, left, height and width of a rectangle to erase; None if none is drawn, or none fits."""
        if rng.random() >= self.erase:
            return None
        height, width = self.image_size
        for _ in range(ERASE_TRIES):
            area = rng.uniform(*ERASE_AREA) * height * width
            ratio = ERASE_RATIO ** rng.uniform(-1, 1)  # log-uniform: tall and wide rectangles are equally likely
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
def _fixed_seed(seed: int) -> Iterator[None]:
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


NUM_PARAMS = 14  # box 4, flip, brightness, contrast, shift 2, rectangle 4 (height 0: none), number of its noise
NOISE = 1 << 24  # number of noise patterns of an erased rectangle; float32 represents all of them


def encode_params(augment: Augment, size: tuple[int, int], key: tuple[int | str, ...]) -> Tensor:
    """The augmentation parameters of a sample, as numbers.

    Args:
        size: Width and height of the image.
    Shapes:
        -> float32 (NUM_PARAMS,)
    """
    params = augment.draw_params(size, key)
    shift, place = (0, 0), None
    if isinstance(augment, ClassAugment):
        shift = augment.draw_shift(key) if augment.pad_crop else shift
        place = augment.draw_rectangle(numpy_rng("erase", *key)) if augment.erase else None
    box = params.box or (0.0, 0.0, *map(float, size))
    noise = hash_key("noise", *key) % NOISE
    return torch.tensor(
        [*box, params.flip, params.brightness, params.contrast, *shift, *(place or (0, 0, 0, 0)), noise]
    )


def apply_params(images: Tensor, numbers: Tensor, augment: Augment) -> Tensor:
    """Applies augmentation parameters to a batch.

    Shapes:
        images uint8 (B, 3, any, any), numbers (B, NUM_PARAMS) -> uint8 (B, 3, H, W), the augmentation's image_size
    """
    if augment.min_scale < 1 or augment.min_ratio < 1:
        images = crop_and_resize(images, numbers[:, :4], augment.image_size, FILTERS[augment.interpolation])
    if augment.horizontal_flip:
        images = torch.where(_per_image(numbers[:, 4] > 0), images.flip(-1), images)
    if augment.color_jitter:
        images = adjust_light(images, numbers[:, 5], numbers[:, 6])
    if isinstance(augment, ClassAugment) and augment.pad_crop:
        images = shift_images(images, numbers[:, 7:9].long(), augment.pad_crop)
    if isinstance(augment, ClassAugment) and augment.erase:
        images = erase_rectangles(images, numbers[:, 9:13].long(), numbers[:, 13].long())
    return images


def _per_image(values: Tensor) -> Tensor:
    """Reshapes one number per image, (B,), to broadcast over pixels: (B, 1, 1, 1)."""
    return values[:, None, None, None]


def _cubic(x: Tensor, a: float = -0.5) -> Tensor:
    """Cubic convolution (Keys 1981), as in Pillow."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


FILTERS: dict[str, Callable[[Tensor], Tensor]] = {"bilinear": lambda x: (1 - x.abs()).clamp(min=0), "bicubic": _cubic}


def crop_and_resize(images: Tensor, boxes: Tensor, size: tuple[int, int], kernel: Callable[[Tensor], Tensor]) -> Tensor:
    """Crops and resizes with antialiasing, like Pillow: two passes, each a product with one matrix per image.

    Width comes first, as in Pillow up to version 12; later versions begin with height if that is less work.

    Shapes:
        images uint8 (B, 3, H, W), boxes (B, 4): left, top, right, bottom -> uint8 (B, 3, *size)
    """
    across = _weights(boxes[:, 0], boxes[:, 2], images.shape[3], size[1], kernel)  # (B, size[1], W)
    down = _weights(boxes[:, 1], boxes[:, 3], images.shape[2], size[0], kernel)  # (B, size[0], H)
    rows = _round_pixels(torch.einsum("bchw,bsw->bchs", images.float(), across))
    return _round_pixels(torch.einsum("bchs,bth->bcts", rows, down)).to(torch.uint8)


def _weights(begin: Tensor, end: Tensor, source: int, size: int, kernel: Callable[[Tensor], Tensor]) -> Tensor:
    """Resampling weights of the source pixels for each resized pixel: (B, size, source)."""
    scale = (end - begin)[:, None, None] / size
    centers = begin[:, None, None] + (torch.arange(size, device=begin.device)[:, None] + 0.5) * scale  # (B, size, 1)
    places = torch.arange(source, device=begin.device) + 0.5
    weights = kernel((places - centers) / scale.clamp(min=1))
    return weights / weights.sum(-1, keepdim=True)


def _round_pixels(pixels: Tensor) -> Tensor:
    return (pixels + 0.5).floor().clamp(0, 255)


def adjust_light(images: Tensor, brightness: Tensor, contrast: Tensor) -> Tensor:
    """Multiplies pixel values of each image by one factor, and their distance to its mean grey by another."""
    red, green, blue = images.int().unbind(1)
    luma = red * 19595 + green * 38470 + blue * 7471 + 32768 >> 16  # Pillow's weights, (B, H, W)
    grey = luma.float().mean((1, 2)) * brightness
    mean, factor = _per_image(grey), _per_image(contrast)
    return ((images * _per_image(brightness) - mean) * factor + mean).round().clamp(0, 255).to(torch.uint8)


def shift_images(images: Tensor, by: Tensor, max_shift: int) -> Tensor:
    """Shifts each image by (x, y) pixels and fills with black: by (B, 2)."""
    rows, height, width = len(images), *images.shape[2:]
    padded = F.pad(images, [max_shift] * 4)
    across = max_shift - by[:, :1] + torch.arange(width, device=images.device)  # (B, W)
    down = max_shift - by[:, 1:] + torch.arange(height, device=images.device)  # (B, H)
    image_index = torch.arange(rows, device=images.device)[:, None, None, None]
    channel = torch.arange(images.shape[1], device=images.device)[:, None, None]
    return padded[image_index, channel, down[:, None, :, None], across[:, None, None, :]]


def erase_rectangles(images: Tensor, places: Tensor, noises: Tensor) -> Tensor:
    """Fills a rectangle of each image with noise.

    Args:
        places: Top, left, height and width; a height of 0 erases nothing.
        noises: Number of the noise pattern, which is the same on every device.
    Shapes:
        images uint8 (B, 3, H, W), places (B, 4), noises (B,) -> uint8 (B, 3, H, W)
    """
    top, left, height, width = (_per_image(part) for part in places.unbind(1))
    down = torch.arange(images.shape[2], device=images.device)[:, None]
    across = torch.arange(images.shape[3], device=images.device)
    inside = (down >= top) & (down < top + height) & (across >= left) & (across < left + width)
    pixel = torch.arange(images[0].numel(), device=images.device).view(images.shape[1:])
    # A uniform byte for each number of a pixel (SplitMix64, Steele et al. 2014).
    numbers = (pixel + _per_image(noises) * images[0].numel()) * -7046029254386353131
    for multiplier, shift in ((-4658895280553007687, 30), (-7723592293110705685, 27)):
        numbers = (numbers ^ (numbers >> shift & (1 << 64 - shift) - 1)) * multiplier
    return torch.where(inside, (numbers >> 56 & 255).to(torch.uint8), images)
