"""Captioned images for training and evaluation."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Protocol

from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from vlm.data.batch import BadSample, Sample, collate
from vlm.data.features.feature_file import FeatureFile
from vlm.data.features.fingerprint import signature_of
from vlm.data.images.augment import Augment
from vlm.data.images.image import ImageError, Preprocess
from vlm.data.order import Key
from vlm.data.text.tokenizer import Tokenizer, tokenizer_from_state
from vlm.errors import Count, Range, Supplied
from vlm.randomness import key
from vlm.training.data_module import Data, Workers, hold_out


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

    def signature(self, index: int) -> str | None:
        return signature_of(self.split, self.indices[index])


class CaptionDataset(Dataset):
    """Samples of a split, ready for a batch; whatever worker makes one, it is the same.

    Args:
        split: Where images and captions come from.
        tokenizer: Writes captions as ids.
        max_len: Longest caption in tokens with its begin and end; longer ones are cut, their end kept.
        preprocess: Turns an image into pixels.
        augment: Used instead of preprocess in training.
        seed: Key of the augmentation.
        features: Features of the images, which are read in their place.
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
        features: FeatureFile | None = None,
    ) -> None:
        self.split, self.tokenizer, self.max_len, self.features = split, tokenizer, max_len, features
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
            image = self.features.read(index) if self.features else self._pixels(epoch, index)
        except ImageError as fault:
            return BadSample(name, str(fault))
        captions = [self.encode(caption) for caption in self.split.captions(epoch, index)]
        return Sample(name, image, captions, [] if self.augment else self.split.references(index))

    def _pixels(self, epoch: int, index: int) -> Tensor:
        image = self.split.image(epoch, index)
        return self.augment(image, (self.seed, epoch, index)) if self.augment else self.preprocess(image)


class CaptionData(Data):
    """Captioned images for training and evaluation.

    Args:
        source: The data set.
        tokenizer: Learned from the training captions unless it already is.
        preprocess: Deterministic preprocessing of validation, test and use.
        augment: Augmentation of training images.
        max_len: Longest caption in tokens, with its begin and end.
        bucket: How many batches are sorted by length together; 1 sorts nothing.
        train_samples: Train on the first so many samples alone, the same in every epoch; None for all.
        cache: Folder where learned tokenizers are kept.
        cache_features: As in Data.
        batch_size, eval_batch_size, num_workers, seed: As in Data.
    """

    supplies = ("tokenizer", "preprocess")

    def __init__(
        self,
        *,
        source: CaptionSource,
        tokenizer: Supplied[Tokenizer],
        preprocess: Preprocess,
        augment: Augment,
        batch_size: Count,
        eval_batch_size: Count,
        num_workers: Workers,
        max_len: Annotated[int, Range(3)],
        seed: Supplied[int],
        bucket: Count = 32,
        train_samples: Count | None = None,
        cache: Supplied[str | None] = None,
        cache_features: bool = False,
    ) -> None:
        super().__init__(
            splits=_open(source, seed, train_samples),
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            seed=seed,
            cache_features=cache_features,
        )
        self.source, self.tokenizer = source, tokenizer
        self.preprocess, self.augment = preprocess, augment
        self.max_len, self.cache, self.bucket = max_len, cache, bucket

    @property
    def sizes(self) -> dict[str, int]:
        return {"vocab_size": self.tokenizer.vocab_size}

    @property
    def skipped(self) -> Sequence[str]:
        return getattr(self.source, "skipped", ())

    def prepare(self) -> None:
        """Learns the tokenizer from the captions of the training split's first epoch."""
        train = self.split("train")
        texts = (caption for index in range(len(train)) for caption in train.captions(0, index))
        self.tokenizer.fit(texts, cache=Path(self.cache) if self.cache else None)

    def restore(self, about: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer_from_state(about["tokenizer"])
        self.preprocess = Preprocess.from_state(about["preprocess"])
        self._datasets.clear()

    def fingerprint(self) -> str:
        """A hash of the training split's names and captions."""
        train = self.split("train")
        first, last = train.captions(0, 0), train.captions(0, len(train) - 1)
        parts = [str(len(train)), train.sample_id(0, 0), train.sample_id(0, len(train) - 1), *first, *last]
        if not train.fresh:
            parts += [text for index in range(len(train)) for text in train.captions(0, index)]
        return f"{key(*parts):016x}"

    def open_dataset(self, name: str, *, augmented: bool) -> CaptionDataset:
        return CaptionDataset(
            split=self.split(name),
            tokenizer=self.tokenizer,
            max_len=self.max_len,
            preprocess=self.preprocess,
            augment=self.augment if augmented else None,
            seed=self.seed,
            features=self.features if augmented else None,
        )

    def collate(self) -> Callable[[Any], Any]:
        return partial(collate, pad_id=self.tokenizer.pad_id, image_size=self.preprocess.image_size)

    def order(self, dataset: CaptionDataset) -> dict[str, Any]:
        return {"bucket": self.bucket, "lengths": dataset.lengths}


def _open(source: CaptionSource, seed: int, train_samples: int | None) -> dict[str, CaptionSplit]:
    splits: dict[str, CaptionSplit] = {name: source.split(name) for name in source.splits}
    if "val" not in splits and "train" in splits:
        train = splits["train"]
        kept, held = hold_out(len(train), seed)
        splits |= {"train": Part(train, kept), "val": Part(train, held)}
    if train_samples is not None:
        splits["train"] = Part(splits["train"], range(min(train_samples, len(splits["train"]))))
    return splits
