"""Training images stored on the device, where batches are cropped and augmented."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from vlm.data.batch import DeviceImages
from vlm.data.fields import AugmentKey, Field, ImageField
from vlm.data.images.augment import Augment
from vlm.data.images.class_augment import FILTERS, NUMBERS, ClassAugment, augmented, draw
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
        augment = self.images.augment_of(record)
        return index, torch.zeros(NUMBERS) if augment is None else draw(augment, self.size, key)

    def collate(self, values: Sequence[tuple[int, Tensor]]) -> Any:
        index = torch.tensor([index for index, _ in values], dtype=torch.long)
        return DeviceImages(index, torch.stack([row for _, row in values]) if values else torch.empty(0, NUMBERS))


SHARE = 0.5  # of the device's free memory that images may take
OFF = "or set data.images_on_device=false"


def move_images_to_device(run: Any) -> None:
    """Moves the training images of a run to its device and makes training read them there.

    Args:
        run: The vlm.training.run.run.Run.
    Raises:
        UserError: They cannot be kept: they differ between epochs, are too many or of several sizes, or cannot be
            augmented in batches.
    """
    data, device = run.data, run.trainer.strategy.root_device
    _, images = data.images
    split, augment = data.split("train"), images.augment
    if split.record(0).open_more:
        raise UserError(f"data.images_on_device: these records hold several images; take other data, {OFF}")
    if fault := next(faults(split.fresh, augment), None):
        raise UserError(f"data.images_on_device: {fault}, {OFF}")
    field = _Whole(images, split.records()) if crops(augment) else _Shown(images)
    pixels, bad = read(data, field)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    if free is not None and pixels.numel() > SHARE * free:
        raise UserError(
            f"data.images_on_device: they take {pixels.numel() / 1e9:.1f} GB, too much of the device; {OFF}"
        )
    held = pixels.to(device)

    def batch(kept: DeviceImages) -> Tensor:
        chosen = held[kept.index]
        return chosen if augment is None else augmented(chosen, kept.numbers, augment)

    data.use_device_images(DeviceImageField(images, field.size, bad), batch)


def crops(augment: Augment | None) -> bool:
    """Returns True for an augmentation that crops the whole image, not only what evaluation sees."""
    return augment is not None and (augment.min_scale < 1 or augment.min_ratio < 1)


def faults(fresh: bool, augment: Augment | None) -> Iterator[str]:
    """Yields a line for each reason why a split's images cannot be augmented on the device."""
    if fresh:
        yield "its images are other ones in each epoch; take other data"
    if isinstance(augment, ClassAugment) and augment.policy is not None:
        yield "a policy changes each image in its own way; set data.augment.policy=null"
    if augment is not None and crops(augment):
        if augment.resize == "pad":
            yield "images with a border cannot be cropped in batches; set data.preprocess.resize=squash"
        if augment.interpolation not in FILTERS:
            yield f"crops in batches are {' or '.join(FILTERS)}; set data.augment.interpolation"


class _Shown(ImageField):
    """Image field that reads images as evaluation does."""

    def __init__(self, images: ImageField) -> None:
        super().__init__(preprocess=images.preprocess)
        self.size = images.preprocess.image_size[::-1]


class _Whole(_Shown):
    """Image field that reads whole images, all of one size.

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
            shown = " and ".join("{} x {}".format(*size) for size in (self.size, image.size))
            raise UserError(f"data.images_on_device: images of {shown} pixels cannot be cropped in batches; {OFF}")
        return to_tensor(image)


def read(data: Any, field: _Shown) -> tuple[Tensor, dict[int, str]]:
    """Returns all training images, uint8 (N, 3, H, W), black if unreadable, and the reasons for those by index."""
    count, bad = len(data.split("train")), dict[int, str]()
    pixels = torch.zeros(count, 3, *field.size[::-1], dtype=torch.uint8)
    for good, images, faults in data.read_images(field, range(count), data.eval_batch_size):
        bad |= faults
        if images is not None:
            pixels[good] = images
    return pixels, bad
