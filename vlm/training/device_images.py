"""Training images stored on the device, where batches are cropped and augmented."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from vlm.data.batch import DeviceImages
from vlm.data.fields import AugmentKey, Field, ImageField
from vlm.data.images.augment import Augment
from vlm.data.images.class_augment import FILTERS, NUM_PARAMS, ClassAugment, apply_params, encode_params
from vlm.data.images.image import ImageError
from vlm.data.images.resize import to_tensor
from vlm.data.records import Record
from vlm.errors import UserError


class DeviceImageField(Field):
    """Replaces images by their indices on the device and their augmentation parameters.

    Args:
        images: The field that it replaces.
        size: Width and height of the images.
        faults: Reasons, by index, why images could not be read.
    Shapes:
        DeviceImages of index (B,), numbers (B, NUMBERS)
    """

    def __init__(self, images: ImageField, size: tuple[int, int], faults: Mapping[int, str]) -> None:
        self.images, self.size, self.faults = images, size, faults

    def encode(self, record: Record, key: AugmentKey | None) -> tuple[int, Tensor]:
        assert key is not None, "images are stored on the device for training only"
        index = int(key[2])
        if index in self.faults:
            raise ImageError(self.faults[index])
        augment = self.images.choose_augment(record)
        return index, torch.zeros(NUM_PARAMS) if augment is None else encode_params(augment, self.size, key)

    def collate(self, values: Sequence[tuple[int, Tensor]]) -> Any:
        index = torch.tensor([index for index, _ in values], dtype=torch.long)
        return DeviceImages(index, torch.stack([row for _, row in values]) if values else torch.empty(0, NUM_PARAMS))


SHARE = 0.5  # of the device's free memory, at most, for the images
OFF = "or set data.images_on_device=false"


def move_images_to_device(run: Any) -> None:
    """Moves the training images of a run to its device, from which training then reads them.

    Args:
        run: The vlm.training.run.run.Run.
    Raises:
        UserError: The images differ between epochs, need too much memory, have several sizes, or cannot be augmented
            in batches.
    """
    data, device = run.data, run.trainer.strategy.root_device
    _, images = data.images
    split, augment = data.split("train"), images.augment
    if split.record(0).open_more:
        raise UserError(f"data.images_on_device: these records hold several images; choose other data, {OFF}")
    if fault := next(find_faults(split.fresh, augment), None):
        raise UserError(f"data.images_on_device: {fault}, {OFF}")
    field = _FullImageField(images, split.records()) if has_crops(augment) else _EvaluationImageField(images)
    pixels, unreadable = read_pixels(data, field)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    if free is not None and pixels.numel() > SHARE * free:
        raise UserError(
            f"data.images_on_device: the images need {pixels.numel() / 1e9:.1f} GB, more than {SHARE:.0%} of the free "
            f"GPU memory; {OFF}"
        )
    stored = pixels.to(device)

    def augment_batch(batch: DeviceImages) -> Tensor:
        selected = stored[batch.index]
        return selected if augment is None else apply_params(selected, batch.numbers, augment)

    data.use_device_images(DeviceImageField(images, field.size, unreadable), augment_batch)


def has_crops(augment: Augment | None) -> bool:
    """Returns True for an augmentation that crops the full image, not only the part that evaluation reads."""
    return augment is not None and (augment.min_scale < 1 or augment.min_ratio < 1)


def find_faults(fresh: bool, augment: Augment | None) -> Iterator[str]:
    """Yields a line for each reason why a split's images cannot be augmented on the device."""
    if fresh:
        yield "its images differ between epochs; choose other data"
    if isinstance(augment, ClassAugment) and augment.policy is not None:
        yield "a policy transforms every image differently; set data.augment.policy=null"
    if augment is not None and has_crops(augment):
        if augment.resize == "pad":
            yield "images with a border cannot be cropped in batches; set data.preprocess.resize=squash"
        if augment.interpolation not in FILTERS:
            yield f"crops in batches are {' or '.join(FILTERS)}; set data.augment.interpolation"


class _EvaluationImageField(ImageField):
    """Image field that reads images as evaluation does."""

    def __init__(self, images: ImageField) -> None:
        super().__init__(preprocess=images.preprocess)
        self.size = images.preprocess.image_size[::-1]


class _FullImageField(_EvaluationImageField):
    """Image field that reads images without a crop. All must have the same size.

    Args:
        records: Records of the split; the first image that can be read gives the size.
    """

    def __init__(self, images: ImageField, records: Iterable[Record]) -> None:
        super().__init__(images)
        for record in records:
            with suppress(ImageError):
                self.size = record.image().size
                return

    def encode(self, record: Record, key: Any) -> Tensor:
        image = record.image()
        if image.size != self.size:
            sizes = " and ".join("{} x {}".format(*size) for size in (self.size, image.size))
            raise UserError(f"data.images_on_device: images of {sizes} pixels cannot be cropped in batches; {OFF}")
        return to_tensor(image)


def read_pixels(data: Any, field: _EvaluationImageField) -> tuple[Tensor, dict[int, str]]:
    """Returns all training images, uint8 (N, 3, H, W), black if unreadable, and the reasons for those by index."""
    count, unreadable = len(data.split("train")), dict[int, str]()
    pixels = torch.zeros(count, 3, *field.size[::-1], dtype=torch.uint8)
    for readable, images, faults in data.read_images(field, range(count), data.eval_batch_size):
        unreadable |= faults
        if images is not None:
            pixels[readable] = images
    return pixels, unreadable
