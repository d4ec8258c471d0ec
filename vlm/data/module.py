"""The data module of captioned images: splits, tokenizer, preprocessing and loaders put together."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import lightning as L
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from vlm.data.batch import BadSample, CaptionBatch, Sample, collate
from vlm.data.image import ImageError, Preprocess
from vlm.data.sampler import EvalBatches, Key, TrainBatches, count_batches
from vlm.data.tokenizer import Tokenizer
from vlm.data.transforms import Augment
from vlm.errors import UserError
from vlm.randomness import key, numpy_rng

HELD_OUT = 0.02  # share of train that validates where a data set has no validation split


class CaptionSplit(Protocol):
    """One split of a source of captioned images. A fresh split has other samples in every epoch."""

    fresh: bool

    def __len__(self) -> int: ...
    def image(self, epoch: int, index: int) -> Image.Image: ...
    def captions(self, epoch: int, index: int) -> list[str]: ...
    def references(self, index: int) -> list[str]: ...
    def sample_id(self, epoch: int, index: int) -> str: ...


class CaptionSource(Protocol):
    """A data set of captioned images."""

    splits: tuple[str, ...]

    def split(self, name: str) -> CaptionSplit: ...


class Part:
    """Some samples of a split, by index, the same ones in every epoch; itself a split."""

    fresh = False

    def __init__(self, split: CaptionSplit, indices: Sequence[int]) -> None:
        self.split, self.indices = split, indices

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, epoch: int, index: int) -> Image.Image:
        return self.split.image(0, self.indices[index])

    def captions(self, epoch: int, index: int) -> list[str]:
        return self.split.captions(0, self.indices[index])

    def references(self, index: int) -> list[str]:
        return self.split.references(self.indices[index])

    def sample_id(self, epoch: int, index: int) -> str:
        return self.split.sample_id(0, self.indices[index])


class CaptionDataset(Dataset):
    """Samples of a split, ready for a batch; whatever worker makes one, it is the same.

    Args:
        split: Where images and captions come from.
        tokenizer: Writes captions as ids.
        max_len: Longest caption in tokens with its begin and end; longer ones are cut, their end kept.
        preprocess: Turns an image into pixels.
        augment: Used instead of preprocess in training.
        seed: Key of the augmentation.
    """

    def __init__(
        self,
        *,
        split: CaptionSplit,
        tokenizer: Tokenizer,
        max_len: int,
        preprocess: Preprocess,
        augment: Augment | None = None,
        seed: int = 0,
    ) -> None:
        self.split, self.tokenizer, self.max_len = split, tokenizer, max_len
        self.preprocess, self.augment, self.seed = preprocess, augment, seed
        self._encoded: dict[str, list[int]] = {}
        self._lengths: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        return len(self.split)

    def encode(self, caption: str) -> list[int]:
        """A caption as ids between begin and end; remembered, because bucketing by length asks for them too."""
        ids = self._encoded.get(caption)
        if ids is None:
            body = self.tokenizer.encode(caption)[: self.max_len - 2]
            ids = self._encoded[caption] = [self.tokenizer.bos_id, *body, self.tokenizer.eos_id]
        return ids

    def lengths(self, epoch: int) -> list[int]:
        """Tokens of each sample's row in an epoch."""
        epoch = epoch if self.split.fresh else 0
        if self._lengths is None or self._lengths[0] != epoch:
            self._lengths = epoch, self._measure(epoch)
        return self._lengths[1]

    def _measure(self, epoch: int) -> list[int]:
        return [sum(len(self.encode(c)) for c in self.split.captions(epoch, i)) for i in range(len(self))]

    def __getitem__(self, at: Key) -> Sample | BadSample:
        epoch, index = at
        name = self.split.sample_id(epoch, index)
        try:
            image = self.split.image(epoch, index)
            pixels = self.augment(image, (self.seed, epoch, index)) if self.augment else self.preprocess(image)
        except ImageError as fault:
            return BadSample(name, str(fault))
        captions = [self.encode(caption) for caption in self.split.captions(epoch, index)]
        return Sample(name, pixels, captions, [] if self.augment else self.split.references(index))


class CaptionData(L.LightningDataModule):
    """Captioned images for training and evaluation.

    Args:
        source: The data set.
        tokenizer: Learned from the training captions unless it already is.
        preprocess: Deterministic preprocessing of validation, test and use.
        augment: Augmentation of training images.
        batch_size: Images of a training step's global batch, over all devices.
        eval_batch_size: Images of an evaluation batch, over all devices.
        num_workers: Processes that read images, each device's; "auto" takes what the machine has, at most 8.
        max_len: Longest caption in tokens, with its begin and end.
        seed: Key of the order and of the augmentation.
        bucket: How many batches are sorted by length together; 1 sorts nothing.
        train_samples: Train on the first so many samples alone, the same in every epoch; None for all.
        cache: Folder where learned tokenizers are kept.
    """

    def __init__(
        self,
        *,
        source: CaptionSource,
        tokenizer: Tokenizer,
        preprocess: Preprocess,
        augment: Augment,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int | str,
        max_len: int,
        seed: int,
        bucket: int = 32,
        train_samples: int | None = None,
        cache: str | None = None,
    ) -> None:
        super().__init__()
        self.source, self.tokenizer = source, tokenizer
        self.preprocess, self.augment = preprocess, augment
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.num_workers = min(8, os.cpu_count() or 1) if num_workers == "auto" else int(num_workers)
        self.max_len, self.seed, self.cache, self.bucket = max_len, seed, cache, bucket
        self._splits = self._open_splits()
        if train_samples is not None:
            self._splits["train"] = Part(self._splits["train"], range(min(train_samples, len(self._splits["train"]))))
        self._datasets: dict[tuple[str, bool], CaptionDataset] = {}
        self.test_split = self.final_split

    def _open_splits(self) -> dict[str, CaptionSplit]:
        splits: dict[str, CaptionSplit] = {name: self.source.split(name) for name in self.source.splits}
        if "val" not in splits and "train" in splits:
            train, size = splits["train"], len(splits["train"])
            held = max(1, round(HELD_OUT * size))
            if size < 2:
                raise UserError("data: one training image is too few to hold one out for validation; add images")
            order = numpy_rng(self.seed, "held out").permutation(size).tolist()
            splits |= {"train": Part(train, sorted(order[held:])), "val": Part(train, sorted(order[:held]))}
        return splits

    def split(self, name: str) -> CaptionSplit:
        """The split of this name.

        Raises:
            UserError: The data set has no such split.
        """
        if name not in self._splits:
            raise UserError(f"data: there is no split {name!r}; there are {', '.join(self._splits)}")
        return self._splits[name]

    @property
    def final_split(self) -> str:
        """The split that a finished run is judged on: test, or val where there is no test."""
        return "test" if "test" in self._splits else "val"

    def fit_tokenizer(self) -> Tokenizer:
        """Learns the tokenizer from the captions of the training split's first epoch."""
        train = self.split("train")
        texts = (caption for index in range(len(train)) for caption in train.captions(0, index))
        self.tokenizer.fit(texts, cache=Path(self.cache) if self.cache else None)
        return self.tokenizer

    def fingerprint(self) -> str:
        """A hash of the training split's names and captions: a resumed run must go on with the same."""
        train = self.split("train")
        first, last = train.captions(0, 0), train.captions(0, len(train) - 1)
        parts = [str(len(train)), train.sample_id(0, 0), train.sample_id(0, len(train) - 1), *first, *last]
        if not train.fresh:
            parts += [text for index in range(len(train)) for text in train.captions(0, index)]
        return f"{key(*parts):016x}"

    def dataset(self, name: str, *, augmented: bool = False) -> CaptionDataset:
        """The samples of a split, as training reads them if augmented, else as evaluation does."""
        if (name, augmented) not in self._datasets:
            self._datasets[name, augmented] = CaptionDataset(
                split=self.split(name),
                tokenizer=self.tokenizer,
                max_len=self.max_len,
                preprocess=self.preprocess,
                augment=self.augment if augmented else None,
                seed=self.seed,
            )
        return self._datasets[name, augmented]

    def _ranks(self) -> dict[str, int]:
        trainer = self.trainer
        return {"rank": trainer.global_rank, "world": trainer.world_size} if trainer else {"rank": 0, "world": 1}

    def _loader(self, dataset: CaptionDataset, batches: TrainBatches | EvalBatches) -> DataLoader[CaptionBatch]:
        image_size = self.preprocess.image_size
        return DataLoader(
            dataset,
            batch_sampler=batches,  # keys are (epoch, index), not bare indices
            collate_fn=partial(collate, pad_id=self.tokenizer.pad_id, image_size=image_size),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    def train_batches(self) -> int:
        """Batches of an epoch, on each rank."""
        return count_batches(len(self.split("train")), self.batch_size, self._ranks()["world"])

    def train_dataloader(self) -> DataLoader[CaptionBatch]:
        dataset, ranks = self.dataset("train", augmented=True), self._ranks()
        batches = TrainBatches(
            size=len(dataset),
            batch_size=self.batch_size,
            seed=self.seed,
            position=self._position,
            bucket=self.bucket,
            lengths=dataset.lengths,
            **ranks,
        )
        return self._loader(dataset, batches)

    def _position(self) -> tuple[int, int]:
        """Where training stands: (epoch, batches of it done), as the trainer's own loops have it."""
        if self.trainer is None:
            return 0, 0
        loop: Any = self.trainer.fit_loop
        return loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready

    def eval_dataloader(self, name: str) -> DataLoader[CaptionBatch]:
        dataset = self.dataset(name)
        return self._loader(dataset, EvalBatches(size=len(dataset), batch_size=self.eval_batch_size, **self._ranks()))

    def test_dataloader(self) -> DataLoader[CaptionBatch]:
        return self.eval_dataloader(self.test_split)

    def val_dataloader(self) -> DataLoader[CaptionBatch]:
        return self.eval_dataloader("val")
