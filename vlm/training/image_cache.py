"""Training images that are read once: kept on the device, or as cached features of a frozen encoder."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from vlm.config.build import build
from vlm.config.target import find
from vlm.config.tree import Config
from vlm.data.batch import DeviceImages
from vlm.data.features import (
    FeatureField,
    FeatureFile,
    Layout,
    find_augment_problem,
    is_complete,
    open_features,
    source_hash,
)
from vlm.data.fields import AugmentKey, Field, ImageField, ImageViewsField
from vlm.data.images.augment import Augment
from vlm.data.images.class_augment import FILTERS, NUM_PARAMS, ClassAugment, apply_params, encode_params
from vlm.data.images.image import ImageError, Preprocess
from vlm.data.images.resize import to_tensor
from vlm.data.images.token_field import ImageTokenField
from vlm.data.records import Record
from vlm.data.store.storage import file_lock
from vlm.errors import UserError
from vlm.models.context import Features, frozen_part, projects
from vlm.models.encoder_decoder import CHUNK_SIZE
from vlm.models.pretrained.stack import Spec
from vlm.training.data_module import Data
from vlm.training.run.processes import is_rank_zero, rank_zero_first


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

    def collate(self, values: Sequence[tuple[int, Tensor]]) -> DeviceImages:
        index = torch.tensor([index for index, _ in values], dtype=torch.long)
        return DeviceImages(index, torch.stack([row for _, row in values]) if values else torch.empty(0, NUM_PARAMS))


SHARE = 0.5  # of the device's free memory, at most, for the images
OFF = "or set data.images_on_device=false"


def move_images_to_device(data: Data, device: torch.device) -> None:
    """Moves the training images to a device, from which training then reads them.

    Raises:
        UserError: The images differ between epochs, need too much memory, have several sizes, or cannot be augmented
            in batches.
    """
    _, images = data.images
    split, augment = data.split("train"), images.augment
    if isinstance(images, ImageViewsField):
        raise UserError(f"data.images_on_device: is not supported for models that read images inside texts; {OFF[3:]}")
    if isinstance(images, ImageTokenField):
        raise UserError(f"data.images_on_device: is not supported for models that write images; {OFF[3:]}")
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

    data.replace_images(DeviceImageField(images, field.size, unreadable), augment_batch)


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

    def encode(self, record: Record, key: AugmentKey | None) -> Tensor:
        image = record.image()
        if image.size != self.size:
            sizes = " and ".join("{} x {}".format(*size) for size in (self.size, image.size))
            raise UserError(f"data.images_on_device: images of {sizes} pixels cannot be cropped in batches; {OFF}")
        return to_tensor(image)


def read_pixels(data: Data, field: _EvaluationImageField) -> tuple[Tensor, dict[int, str]]:
    """Returns all training images, uint8 (N, 3, H, W), black if unreadable, and the reasons for those by index."""
    count, unreadable = len(data.split("train")), dict[int, str]()
    pixels = torch.zeros(count, 3, *field.size[::-1], dtype=torch.uint8)
    for readable, images, faults in data.read_images(field, range(count), data.eval_batch_size):
        unreadable |= faults
        if images is not None:
            pixels[readable] = images
    return pixels, unreadable


PATIENCE = timedelta(days=7)  # how long the other ranks wait for the one that computes


def feature_faults(config: Config) -> Iterator[str]:
    """Yields a line for each reason why the features of a config's encoder cannot be cached."""
    data, encoder = config["data"], config["model"].get("encoder")
    if not data.get("cache_features") or not encoder:
        return
    if config["task_name"] == "text_to_image":
        yield "data.cache_features: the encoder reads texts, and the images have no features; set it to false"
        return
    parts = ["encoder", *(["encoder.backbone"] if projects(find(encoder["_target_"])) else [])]
    if not set(parts) & set(config["task"].get("freeze", ())):
        yield f"data.cache_features: the encoder is trained, so its features change; set task.freeze=[{parts[-1]}]"
    augment = data.get("augment")
    fault = find_augment_problem(augment and build(augment, "data.augment"))
    if fault:
        yield f"data.cache_features: {fault}, or set it to false"
    for name in ("mixup", "cutmix"):
        if config["task"].get(name):
            yield f"data.cache_features: task.{name} mixes pixels, but training reads features; set it to 0"


def use_cached_features(trainer: L.Trainer, data: Data, encoder: nn.Module, spec: Spec, folder: Path) -> None:
    """Makes training read the features of its images; missing ones are computed and cached.

    Args:
        encoder: The encoder, with the weights of the run.
        spec: Its name and arguments, as checkpoints hold them.
        folder: The cache.
    Raises:
        UserError: There is no room for them, or they cannot be written.
    """
    builder = FeatureCacheBuilder(
        encoder=encoder,
        spec=spec,
        data=data,
        device=trainer.strategy.root_device,
        precision=str(trainer.precision),
        context=trainer.precision_plugin.forward_context,
    )
    with rank_zero_first(PATIENCE):  # rank zero writes the features that the other ranks read
        file = builder.build(folder, lambda line: print(line, flush=True) if is_rank_zero() else None)
        data.replace_images(FeatureField(builder.images, file, builder.first, complete=builder.part is encoder))


def as_read(images: Tensor | Features, preprocess: Preprocess) -> Tensor | Features:
    """The images of a training batch as model input: normalised pixels, or cached features."""
    return images if isinstance(images, Features) else preprocess.normalize(images)


class FeatureCacheBuilder:
    """Computes the features of a run's training images.

    They are computed on training's device and in its precision, and stored in the resulting dtype. Training is then the
    same as without them, except for rounding where the order of sums depends on the batch.

    Args:
        encoder: The encoder; its frozen part has the run's weights.
        spec: Its name and arguments, as checkpoints hold them.
        data: The training images.
        device: Where training computes.
        precision: Precision of training.
        context: Returns a context in which a forward pass has this precision.
    """

    def __init__(
        self,
        *,
        encoder: nn.Module,
        spec: Spec,
        data: Data,
        device: torch.device,
        precision: str,
        context: Callable[[], AbstractContextManager],
    ) -> None:
        self.encoder, self.spec, self.data = encoder, spec, data
        self.split, (_, self.images) = data.split("train"), data.images
        self.device, self.precision, self.context = device, precision, context
        self.part = frozen_part(encoder)
        self.first = np.cumsum([0, *map(self._count_images, self.split.records())])

    def _count_images(self, record: Record) -> int:
        try:
            return self.images.count_views(record)
        except ImageError:
            return 1  # a place without features, whose reason is found when the image is read

    def build(self, folder: Path, say: Callable[[str], None]) -> FeatureFile:
        """Opens the file of features in a cache; computes missing ones.

        If several processes build the same file, one computes the features while the others wait.

        Args:
            folder: The cache.
            say: Prints a line.
        Raises:
            UserError: There is no room for them, or they cannot be written.
        """
        home = next(self.encoder.parameters()).device
        self.part.eval()
        self.encoder.to(self.device)
        try:
            layout = self.layout()
            with nullcontext() if is_complete(folder, layout) else file_lock(layout.path(folder)):
                file = open_features(folder, layout)
                missing = file.missing()
                say(f"features    {layout}; {layout.images - len(missing):,} are in {file.path}")
                file.check_free_space(len(missing))
                size = CHUNK_SIZE if self.device.type == "cpu" else self.data.eval_batch_size
                records = np.unique(np.searchsorted(self.first, missing, side="right") - 1).tolist()
                for good, pixels, bad in self.data.read_images(self.images, records, size, seed=self.data.order_seed):
                    for index, reason in bad.items():
                        file.faults |= dict.fromkeys(self._places(index), reason)
                    places = [place for index in good for place in self._places(index)]
                    for part in () if pixels is None else pixels.split(size):
                        file.write(places[: len(part)], self._features(part))
                        places = places[len(part) :]
        finally:
            self.encoder.to(home)
        return file

    def _places(self, index: int) -> range:
        """Places in the file of a record's images."""
        return range(*self.first[index : index + 2].tolist())

    def layout(self) -> Layout:
        """The layout of a file of these features."""
        states = self._features(torch.zeros(1, 3, *self.images.preprocess.image_size, dtype=torch.uint8))
        return Layout(
            source=self.source(),
            images=int(self.first[-1]),
            states=states.shape[1],
            width=states.shape[2],
            dtype=str(states.dtype).removeprefix("torch."),
        )

    def source(self) -> str:
        """A hash of encoder, images, transform, device and precision."""
        spec = dict(self.spec["args"])
        if self.part is not self.encoder:
            spec.pop("dim", None)  # width of the projection, which comes after the features
        identity = {"name": self.spec["name"], "args": spec, "device": self.device.type, "precision": self.precision}
        digest = blake2b(json.dumps(identity, sort_keys=True, default=repr).encode(), digest_size=16)
        for name, tensor in self.part.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        digest.update(source_hash(self.split, self.images).encode())
        return digest.hexdigest()

    @torch.no_grad()
    def _features(self, images: Tensor) -> Tensor:
        """Features of images from the frozen part: uint8 (B, 3, H, W) -> (B, S, C).

        Raises:
            UserError: The encoder masks some states.
        """
        with self.context():
            pixels = self.images.preprocess.normalize(images.to(self.device))
            if self.part is not self.encoder:
                return self.encoder.features(pixels)  # type: ignore[operator]
            context = self.encoder(pixels)
        if context.mask is not None:
            problem = "this encoder masks some states, which is not supported"
            raise UserError(f"data.cache_features: {problem}; set it to false")
        return context.states
