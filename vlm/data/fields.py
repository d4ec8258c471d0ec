"""Fields: what a task reads of each record. A worker encodes it, and a batch collates it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from vlm.data.batch import CaptionRow, TextRows, next_token_rows, paired_rows
from vlm.data.images.augment import Augment
from vlm.data.images.image import CachedImages, Preprocess
from vlm.data.records import PairedSplit, Record, Source, Split
from vlm.data.text.tokenizer import Tokenizer, tokenizer_from_state
from vlm.data.text.words import words
from vlm.errors import Range, UserError

AugmentKey = tuple[int | str, ...]  # (seed, epoch, index), and the copy's number if samples are repeated


class Field:
    """One input of a task, read from each record.

    A subclass defines `encode` and `collate`, and lists in `needs` what a record must have.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    stratum: ClassVar[str | None] = None  # the value of a record by which held-out samples are stratified
    tokenizer: Tokenizer | None = None  # for fields of text
    # Whether samples are made from the entire split, so that a limit counts samples instead of records.
    reads_entire_split: ClassVar[bool] = False

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        """Prepares the field for an opened data set.

        Args:
            source: The data set.
            splits: Its splits by name, as training and evaluation use them.
            seed: Seed of the data's order and augmentation.
            cache: Folder of files that are cached between runs; None for no cache.
        """

    def texts(self) -> Iterable[str]:
        """Texts of the training split, for learning the tokenizer."""
        return ()

    def prepare(self) -> None:
        """Learns what else a new run needs from the training split, after the tokenizer."""

    def state(self) -> dict[str, Any]:
        """State of the field that inference needs, as plain containers, for the checkpoint."""
        return {}

    def restore(self, about: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""

    @property
    def sizes(self) -> dict[str, int]:
        """Model sizes that depend on the data, by argument name, for example vocab_size."""
        return {}

    def identity(self, record: Record) -> Sequence[str]:
        """Strings that identify what is read of a record, for hashing."""
        return ()

    def view(self, name: str, split: Split, *, training: bool, limit: int | None = None) -> Split:
        """The samples of a split: its records, unless the field makes other samples of them.

        Args:
            name: Name of the split.
            training: Whether the samples are for training.
            limit: Maximum number of samples, for a field with `reads_entire_split`; None for all.
        """
        return split

    def encode(self, record: Record, key: AugmentKey | None) -> Any:
        """Encodes a record, in a worker.

        Args:
            key: Key of random choices in training; None in evaluation, which has none.
        Raises:
            ImageError: The sample cannot be read.
        """
        raise TypeError(f"{type(self).__name__} does not implement encode")

    def collate(self, values: Sequence[Any]) -> Any:
        """Collates the values of a batch, which may be empty."""
        raise TypeError(f"{type(self).__name__} does not implement collate")

    def length(self, record: Record) -> int:
        """Length of a sample, for batches bucketed by length."""
        return 0


def learn_tokenizers(fields: Iterable[Field], cache: Path | None) -> None:
    """Learns each tokenizer from the texts of all fields that share it.

    Args:
        cache: Folder that caches learned tokenizers; None for no cache.
    """
    fields = list(fields)
    for tokenizer in {id(field.tokenizer): field.tokenizer for field in fields}.values():
        if tokenizer is not None:
            texts = (field.texts() for field in fields if field.tokenizer is tokenizer)
            tokenizer.fit(chain.from_iterable(texts), cache=cache)


def choose_augment(augment: Augment | None, record: Record, side_words: frozenset[str]) -> Augment | None:
    """The augmentation of a record's images, without flips if its texts have one of the words."""
    if augment is None or not augment.horizontal_flip or not side_words:
        return augment
    if side_words.isdisjoint(word for text in record.texts for word in words(text.lower())):
        return augment
    without_flip = copy(augment)
    without_flip.horizontal_flip = False
    return without_flip


class ImageField(Field):
    """The image of a record as pixels, or all its images.

    Args:
        preprocess: Deterministic preprocessing for evaluation and inference.
        augment: Augmentation of training images; None for `preprocess` only.
        cache_images: Whether each worker caches decoded images. Pixels do not change; it takes three bytes per pixel
            and worker, and saves decoding from the second epoch on.
        side_words: Words, in lower case, of a record's texts that a mirrored image would make false; single characters
            in Chinese and Japanese.
    Shapes:
        uint8 (B, 3, H, W), with K images per record (B, K, 3, H, W)
    """

    needs: ClassVar[tuple[str, ...]] = ("image",)

    def __init__(
        self,
        *,
        preprocess: Preprocess,
        augment: Augment | None = None,
        cache_images: bool = False,
        side_words: Sequence[str] = (),
    ) -> None:
        self.preprocess, self.augment, self.cache_images = preprocess, augment, cache_images
        self.side_words = frozenset(side_words)

    def state(self) -> dict[str, Any]:
        return {"preprocess": self.preprocess.state()}

    def restore(self, about: Mapping[str, Any]) -> None:
        self.preprocess = Preprocess.from_state(about["preprocess"])

    def view(self, name: str, split: Split, *, training: bool, limit: int | None = None) -> Split:
        return CachedImages(split) if self.cache_images and not split.fresh else split

    def encode(self, record: Record, key: AugmentKey | None) -> Tensor:
        images = record.images()
        keys = [key, *(None if key is None else (*key, number) for number in range(1, len(images)))]
        augment = None if key is None else self.choose_augment(record)
        pixels = [
            self.preprocess(image) if key is None or augment is None else augment(image, key)
            for image, key in zip(images, keys, strict=True)
        ]
        return pixels[0] if len(pixels) == 1 else torch.stack(pixels)

    def count_views(self, record: Record) -> int:
        """Number of images that the encoder reads of a record.

        Raises:
            ImageError: An image cannot be read.
        """
        return 1

    def choose_augment(self, record: Record) -> Augment | None:
        """The augmentation of a record's images, without flips if its texts mention left or right."""
        return choose_augment(self.augment, record, self.side_words)

    def collate(self, values: Sequence[Tensor]) -> Tensor:
        counts = sorted({value.shape[0] if value.ndim > 3 else 1 for value in values})
        if len(counts) > 1:
            numbers = " and ".join(map(str, counts))
            raise UserError(f"data: records have {numbers} images; all records need the same number")
        none = torch.empty(0, 3, *self.preprocess.image_size, dtype=torch.uint8)
        return torch.stack(list(values)) if values else none


class ImageViewsField(ImageField):
    """All images of a record, each whole or cut into squares (`Preprocess.views`); a record may have none.

    Images that are cut are not augmented.

    Args:
        others: See ImageField.
    Shapes:
        uint8 (T, 3, H, W), the views of all records in order
    Raises:
        UserError: Images are cut into squares and there is an augmentation.
    """

    needs = ()

    def __init__(self, *, preprocess: Preprocess, augment: Augment | None = None, **options: Any) -> None:
        if augment is not None and preprocess.tiles:
            raise UserError("data.augment: is not supported for images that are cut into squares; set it to null")
        super().__init__(preprocess=preprocess, augment=augment, **options)

    def encode(self, record: Record, key: AugmentKey | None) -> Tensor:
        images = record.images() if "image" in record else []
        if key is not None and self.augment is not None and images:
            pixels = super().encode(record, key)
            return pixels if pixels.ndim == 4 else pixels[None]
        return self.collate([self.preprocess.views(image)[0] for image in images])

    def count_views(self, record: Record) -> int:
        if not self.preprocess.tiles:
            return ("image" in record) + len(record.open_more)
        return sum(1 + rows * columns for rows, columns in map(self.preprocess.count_squares, record.image_sizes()))

    def collate(self, values: Sequence[Tensor]) -> Tensor:
        none = torch.empty(0, 3, *self.preprocess.image_size, dtype=torch.uint8)
        return torch.cat([none, *values])


class TokenField(Field):
    """Base of fields of text.

    Args:
        tokenizer: Learned from the training texts of all fields that share it, unless it is already learned.
        max_len: Maximum number of tokens of a text, with begin and end; in some subclasses, of a row of texts.
    """

    tokenizer: Tokenizer

    def __init__(self, *, tokenizer: Tokenizer, max_len: Annotated[int, Range(3)]) -> None:
        self.tokenizer, self.max_len = tokenizer, max_len
        self._ids: dict[Any, list[int]] = {}  # encoded texts, cached between samples

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        self._train = splits["train"]

    def texts(self) -> Iterator[str]:
        return (text for record in self._train.records() for text in self.texts_of(record))

    def texts_of(self, record: Record) -> Sequence[str]:
        """The texts that are read or written for a record."""
        raise TypeError(f"{type(self).__name__} does not implement texts_of")

    def prepare(self) -> None:
        self._ids.clear()

    def state(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer.state()}

    def restore(self, about: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer_from_state(about["tokenizer"])
        self._ids.clear()

    @property
    def sizes(self) -> dict[str, int]:
        return {"vocab_size": self.tokenizer.vocab_size}

    def identity(self, record: Record) -> Sequence[str]:
        return self.texts_of(record)


class CaptionField(TokenField):
    """All captions of a record, packed into a row; in evaluation also references and the partner's captions.

    If records have languages, each caption has its language's token after its begin token. It is an input only and does
    not count in the loss.

    Args:
        others: See TokenField; longer captions are truncated before the end token.
    Attributes:
        languages: Languages of the data; empty if unknown.
        truncated: Number of different captions longer than max_len among those that this process has read.
    Shapes:
        TextRows of tokens (B, L), segments (B, L)
    """

    needs = ("captions",)
    paired: ClassVar[bool] = True  # whether evaluation also reads the captions of each sample's partner
    compares = False  # whether training also reads references, for a task that scores captions
    languages: Sequence[str] = ()
    truncated = 0

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        super().open(source, splits, seed=seed, cache=cache)
        self.languages = source.languages
        self.tokenizer.add_languages(self.languages)

    def restore(self, about: Mapping[str, Any]) -> None:
        """Restores the tokenizer.

        Raises:
            UserError: The tokenizer lacks a language of the data.
        """
        super().restore(about)
        for language in (name for name in self.languages if name not in self.tokenizer.languages):
            stored = ", ".join(self.tokenizer.languages) or "unnamed"
            raise UserError(f"data.languages: the checkpoint has no language {language}; its languages are {stored}")

    def texts_of(self, record: Record) -> Sequence[str]:
        return record["captions"]

    def references_of(self, record: Record) -> Sequence[Any]:
        """The values that metrics compare generated texts with."""
        return record["references"]

    def encode_caption(self, caption: str, language: str | None = None) -> list[int]:
        """Token ids of a caption with begin and end; cached, because bucketing by length needs them too."""
        ids = self._ids.get((caption, language))
        if ids is None:
            begin = [self.tokenizer.bos_id, *self.tokenizer.begin(language)]
            body, max_body = self.tokenizer.encode_written(caption), self.max_len - 1 - len(begin)
            self.truncated += len(body) > max_body
            ids = self._ids[caption, language] = [*begin, *body[:max_body], self.tokenizer.eos_id]
        return ids

    def length(self, record: Record) -> int:
        return sum(map(len, self._row(record)))

    def lengths(self, record: Record) -> list[tuple[str, int]]:
        """The texts of a record, each with its number of tokens before truncation."""
        special = 3 if self.languages else 2  # begin, language, end
        return [
            (str(text), len(self.tokenizer.encode_written(str(text))) + special) for text in self.references_of(record)
        ]

    def view(self, name: str, split: Split, *, training: bool, limit: int | None = None) -> Split:
        return PairedSplit(split) if self.paired and not training else split

    def encode(self, record: Record, key: AugmentKey | None) -> CaptionRow:
        if key is not None:
            return CaptionRow(self._row(record), list(self.references_of(record)) if self.compares else [])
        row = self._evaluation_row(record)
        if not self.paired:
            return row
        partner = self._evaluation_row(record["partner"])._replace(sample_index=record["partner_index"])
        return row._replace(sample_index=record["index"], partner=partner)

    def _evaluation_row(self, record: Record) -> CaptionRow:
        languages = record["languages"] if self.languages else ()
        return CaptionRow(self._row(record), list(self.references_of(record)), languages, record.id)

    def _row(self, record: Record) -> list[Any]:
        texts = self.texts_of(record)
        languages = record["languages"] if self.languages else [None] * len(texts)
        return [self.encode_caption(*caption) for caption in zip(texts, languages, strict=True)]

    def collate(self, values: Sequence[CaptionRow]) -> TextRows:
        return paired_rows(values, self._rows)

    def _rows(self, texts: Sequence[Sequence[Any]]) -> TextRows:
        return next_token_rows(texts, self.tokenizer.pad_id, self.tokenizer.language_ids)


class LabelField(Field):
    """The class of a record.

    Shapes:
        int64 (B,)
    """

    needs = ("label",)
    stratum = "label"
    classes: Sequence[str] = ()

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        self.classes, self._splits = list(source.classes), splits

    def state(self) -> dict[str, Any]:
        return {"classes": self.classes}

    def restore(self, about: Mapping[str, Any]) -> None:
        """Checks the classes against a checkpoint.

        Raises:
            UserError: They differ.
        """
        stored = list(about["classes"])
        if stored == self.classes:
            return
        only_stored, only_given = sorted({*stored} - {*self.classes}), sorted({*self.classes} - {*stored})
        parts = [
            f"only in the {owner}: {', '.join(names[:5])}"
            for owner, names in (("checkpoint", only_stored), ("data", only_given))
            if names
        ]
        raise UserError(
            f"data: the classes differ from the checkpoint's ({'; '.join(parts) or 'another order'}); give the "
            "data set that it was trained on"
        )

    @property
    def sizes(self) -> dict[str, int]:
        return {"num_classes": len(self.classes)}

    def counts(self, split: str) -> list[int]:
        """Number of samples per class in a split's first epoch."""
        counts = Counter(record["label"] for record in self._splits[split].records())
        return [counts[label] for label in range(len(self.classes))]

    def identity(self, record: Record) -> Sequence[str]:
        return (self.classes[record["label"]],)

    def encode(self, record: Record, key: AugmentKey | None) -> int:
        return record["label"]

    def collate(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long)


class PairedImageField(ImageField):
    """The image of a record; in evaluation together with that of its partner.

    Args:
        others: See ImageField.
    Shapes:
        uint8 (B, 3, H, W) in training, (B, 2, 3, H, W) in evaluation
    """

    def view(self, name: str, split: Split, *, training: bool, limit: int | None = None) -> Split:
        split = super().view(name, split, training=training, limit=limit)
        return split if training else PairedSplit(split)

    def encode(self, record: Record, key: AugmentKey | None) -> Tensor:
        image = super().encode(record, key)
        return image if key is not None else torch.stack([image, super().encode(record["partner"], None)])
