"""Images in classes for training and evaluation."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vlm.data.batch import BadSample
from vlm.data.features.feature_file import FeatureFile
from vlm.data.images.augment import Augment
from vlm.data.images.image import ImageError, Preprocess
from vlm.data.order import Key
from vlm.data.repeats import Repeated, RepeatedBatches
from vlm.data.sources.class_source import ClassPart, ClassSource, ClassSplit, labels_of, names_of, stratified
from vlm.errors import Count, Supplied, UserError
from vlm.randomness import key
from vlm.training.data_module import HELD_OUT, Data, Workers


@dataclass
class ClassSample:
    """One image and its class."""

    id: str
    image: Tensor
    label: int


@dataclass
class ClassBatch:
    """Images with their classes.

    Shapes:
        images uint8 (B, 3, H, W), or the features kept of them, floating (B, S, C); labels int64 (B,)
    """

    images: Tensor
    labels: Tensor
    ids: list[str]
    bad: list[BadSample]

    def pin_memory(self) -> "ClassBatch":
        self.images, self.labels = self.images.pin_memory(), self.labels.pin_memory()
        return self


def collate_classes(samples: Sequence[ClassSample | BadSample], *, image_size: int) -> ClassBatch:
    """Stacks the samples that could be read; the others are named in `bad`."""
    good = [sample for sample in samples if isinstance(sample, ClassSample)]
    empty = torch.empty(0, 3, image_size, image_size, dtype=torch.uint8)
    return ClassBatch(
        images=torch.stack([sample.image for sample in good]) if good else empty,
        labels=torch.tensor([sample.label for sample in good], dtype=torch.long),
        ids=[sample.id for sample in good],
        bad=[sample for sample in samples if isinstance(sample, BadSample)],
    )


class ClassDataset(Dataset):
    """Samples of a split, ready for a batch; whatever worker makes one, it is the same.

    Args:
        split: Where images and labels come from.
        preprocess: Turns an image into pixels.
        augment: Used instead of preprocess in training.
        seed: Key of the augmentation.
        cache_images: Whether decoded images are kept in memory; a fresh split has none to keep.
        features: Features of the images, which are read in their place.
    """

    def __init__(
        self,
        *,
        split: ClassSplit,
        preprocess: Preprocess,
        augment: Augment | None = None,
        seed: int = 0,
        cache_images: bool = False,
        features: FeatureFile | None = None,
    ) -> None:
        self.split, self.preprocess, self.augment, self.seed = split, preprocess, augment, seed
        self.features = features
        self._cached = cache_images and not split.fresh
        self._images: dict[int, Image.Image] = {}

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, at: Key) -> ClassSample | BadSample:
        return self.sample(*at)

    def sample(self, epoch: int, index: int, *copy: int) -> ClassSample | BadSample:
        """The sample of an index; the number of its copy, if any, joins the key of the augmentation."""
        name = self.split.sample_id(epoch, index)
        try:
            image = self.features.read(index) if self.features else self._pixels(epoch, index, *copy)
        except ImageError as fault:
            return BadSample(name, str(fault))
        return ClassSample(name, image, self.split.label(epoch, index))

    def _pixels(self, epoch: int, index: int, *copy: int) -> Tensor:
        image = self._image(epoch, index)
        return self.augment(image, (self.seed, epoch, index, *copy)) if self.augment else self.preprocess(image)

    def _image(self, epoch: int, index: int) -> Image.Image:
        if not self._cached:
            return self.split.image(epoch, index)
        if index not in self._images:
            self._images[index] = self.split.image(epoch, index)
        return self._images[index]


class ClassData(Data):
    """Images in classes for training and evaluation.

    Without a validation split, a part of train that holds its share of each class validates.

    Args:
        source: The data set.
        preprocess: Deterministic preprocessing of validation, test and use.
        augment: Augmentation of training images.
        train_samples: Train on so many samples alone, each class having its share, the same in every epoch; None for
            all.
        repeats: How often a training image comes in a batch, each time augmented in its own way; 1 is off. An epoch
            keeps its number of steps (`vlm.data.repeats`).
        cache_images: Whether each worker keeps the images it decoded. It changes no pixel; it takes three bytes a pixel
            and worker, and spares the decoding from the second epoch on.
        cache_features: As in Data.
        batch_size, eval_batch_size, num_workers, seed: As in Data.
    Raises:
        UserError: If repeats do not divide the batch size, or there are too few images to hold one out.
    """

    supplies = ("preprocess", "classes")

    def __init__(
        self,
        *,
        source: ClassSource,
        preprocess: Preprocess,
        augment: Augment,
        batch_size: Count,
        eval_batch_size: Count,
        num_workers: Workers,
        seed: Supplied[int],
        train_samples: Count | None = None,
        repeats: Count = 1,
        cache_images: bool = False,
        cache_features: bool = False,
    ) -> None:
        if repeats < 1 or batch_size % repeats:
            raise UserError(f"data.repeats={repeats}: does not divide data.batch_size={batch_size}; give a divisor")
        super().__init__(
            splits=_open(source, seed, train_samples),
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
            cache_features=cache_features,
        )
        self.source, self.classes = source, list(source.classes)
        self.preprocess, self.augment = preprocess, augment
        self.repeats, self.cache_images = repeats, cache_images

    @property
    def sizes(self) -> dict[str, int]:
        return {"num_classes": len(self.classes)}

    @property
    def skipped(self) -> Sequence[str]:
        return self.source.skipped

    def counts(self, name: str) -> list[int]:
        """Samples of each class in a split's first epoch."""
        found = Counter(labels_of(self.split(name)))
        return [found[label] for label in range(len(self.classes))]

    def restore(self, about: Mapping[str, Any]) -> None:
        """Takes the preprocessing; the classes must be the same.

        Raises:
            UserError: They are not.
        """
        known = list(about["classes"])
        if known != self.classes:
            there, here = sorted({*known} - {*self.classes}), sorted({*self.classes} - {*known})
            parts = [
                f"only {where}: {', '.join(names[:5])}" for where, names in (("there", there), ("here", here)) if names
            ]
            raise UserError(
                f"data: the classes are not the checkpoint's ({'; '.join(parts) or 'their order differs'}); give the "
                "data set that it was trained on"
            )
        self.preprocess = Preprocess.from_state(about["preprocess"])
        self._datasets.clear()

    def fingerprint(self) -> str:
        """A hash of the classes and of the training split's names and labels."""
        train = self.split("train")
        parts = [str(len(train)), *self.classes, train.sample_id(0, 0), train.sample_id(0, len(train) - 1)]
        if not train.fresh:
            parts += [*names_of(train), *map(str, labels_of(train))]
        return f"{key(*parts):016x}"

    def open_dataset(self, name: str, *, augmented: bool) -> ClassDataset:
        return ClassDataset(
            split=self.split(name),
            preprocess=self.preprocess,
            augment=self.augment if augmented else None,
            seed=self.seed,
            cache_images=self.cache_images,
            features=self.features if augmented else None,
        )

    def collate(self) -> Callable[[Any], Any]:
        return partial(collate_classes, image_size=self.preprocess.image_size)

    def train_dataloader(self) -> DataLoader[Any]:
        if self.repeats == 1:
            return super().train_dataloader()
        dataset = self.dataset("train", augmented=True)
        batches = RepeatedBatches(repeats=self.repeats, **self._order_of_all(dataset))
        return self.loader(Repeated(dataset, self.repeats), batches, batches.near, self.repeats)


def _open(source: ClassSource, seed: int, train_samples: int | None) -> dict[str, ClassSplit]:
    splits: dict[str, ClassSplit] = {name: source.split(name) for name in source.splits}
    if "val" not in splits:
        train = splits["train"]
        held = _choose(train, max(1, round(HELD_OUT * len(train))), seed, leave=1)
        if not held:
            raise UserError("data: every class has one image alone, too few to hold any out for validation; add some")
        rest = sorted(set(range(len(train))).difference(held))
        splits |= {"train": ClassPart(train, rest), "val": ClassPart(train, held)}
    if train_samples is not None:
        train = splits["train"]
        splits["train"] = ClassPart(train, _choose(train, train_samples, seed, leave=0))
    return splits


def _choose(split: ClassSplit, count: int, seed: int, *, leave: int) -> list[int]:
    return stratified(labels_of(split), names_of(split), count, seed=seed, leave=leave)
