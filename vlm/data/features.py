"""Features of a frozen encoder: a memory-mapped file per split, its key, and its field."""

import json
import os
import shutil
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlm.data.fields import AugmentKey, ImageField, ImageViewsField
from vlm.data.images.augment import Augment
from vlm.data.images.image import ImageError
from vlm.data.records import Record, Split
from vlm.data.store.storage import unwritable_error
from vlm.errors import UserError
from vlm.io.files import atomic_write
from vlm.models.context import Features


def find_augment_problem(augment: Augment | None) -> str | None:
    """Reason why features cannot be cached with an augmentation; None if its output never changes."""
    if augment is None:
        return None
    kind = type(augment)
    if not {"enabled_options", "OFF"} & vars(kind).keys():  # the inherited property does not cover what the class adds
        return f"data.augment may be random: {kind.__name__} does not define `enabled_options`, which lists what is on"
    if not augment.enabled_options:
        return None
    names = (part.partition("=")[0] for part in augment.enabled_options)
    off = " ".join(f"data.augment.{name}={json.dumps(kind.OFF[name])}" for name in names)
    return f"data.augment changes images in every epoch ({', '.join(augment.enabled_options)}); turn it off: {off}"


def check_split(split: Split, images: ImageField) -> None:
    """Checks that the features of a training split can be cached.

    Args:
        images: The field that reads its images.
    Raises:
        UserError: Its images differ between epochs, or changes of them cannot be detected.
    """
    if split.fresh:
        raise UserError(
            "data.cache_features: this data has new images in every epoch; fix them with data.train_samples=N"
        )
    record = split.record(0)
    if isinstance(images, ImageViewsField):
        if (with_image := next((record for record in split.records() if "image" in record), None)) is None:
            raise UserError("data.cache_features: no training sample has an image; set it to false")
        record = with_image
    elif record.open_more:
        raise UserError("data.cache_features: not supported for several images per record; set it to false")
    if record.read_stamp is None:
        raise UserError("data.cache_features: these records have no read_stamp, which detects changed images")


def source_hash(split: Split, images: ImageField) -> str:
    """A hash of the images of a split and of their transform."""
    digest, augment = blake2b(digest_size=16), images.augment or images.preprocess
    transform = {"augment": vars(augment), "preprocess": images.preprocess.state()}
    digest.update(f"{type(augment).__name__} {json.dumps(transform, sort_keys=True, default=repr)}".encode())
    for record in split.records():
        stamp = record.read_stamp() if record.read_stamp else ""
        digest.update(f"{record.id}\0{stamp}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


MAGIC = b"VLMFEATS"
VERSION = 3  # increased when the format or the features change
PAGE = 4096
SUM = np.dtype("<u4")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Layout:
    """Describes the contents of a feature file.

    Args:
        source: Hash of the encoder, the images and the transform.
        images: Number of images.
        states, width: Shape (S, C) of an image's features.
        dtype: torch's name of the data type.
    """

    source: str
    images: int
    states: int
    width: int
    dtype: str

    @property
    def row(self) -> int:
        """Number of bytes per image."""
        return self.states * self.width * DTYPES[self.dtype].itemsize

    @property
    def start(self) -> int:
        """Offset of the features, aligned to a page."""
        return PAGE + -(-self.images * SUM.itemsize // PAGE) * PAGE

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self.start + self.images * self.row

    def path(self, folder: Path) -> Path:
        """Path of the file in a cache folder."""
        digest = blake2b(self.header(), digest_size=16).hexdigest()
        return folder / f"train-{digest}.features"

    def header(self) -> bytes:
        return MAGIC + json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True).encode()

    def __str__(self) -> str:
        return f"{self.images:,} images x {self.states} x {self.width} {self.dtype}, {format_bytes(self.size)}"


class FeatureFile:
    """Reads and writes features on disk.

    Args:
        path: A file created by `open_features`.
        layout: The expected layout.
        faults: Reasons, by index, why images could not be read and have no features.
    Raises:
        UserError: The file does not exist, or its layout or size is wrong.
    """

    def __init__(self, path: Path, layout: Layout, faults: dict[int, str] | None = None) -> None:
        self.path, self.layout, self.faults = path, layout, faults or {}
        header = layout.header()
        try:
            with open(path, "rb") as file:
                is_valid = file.read(PAGE).rstrip(b"\0") == header and os.fstat(file.fileno()).st_size == layout.size
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; give a file of features") from error
        if not is_valid:
            raise UserError(f"{path}: is incomplete or contains other features; delete it to create it again")
        self._sums = np.memmap(path, SUM, "r", PAGE, (layout.images,))
        self._rows = np.memmap(path, np.uint8, "r", layout.start, (layout.images, layout.row))

    def __reduce__(self) -> tuple[type["FeatureFile"], tuple[Path, Layout, dict[int, str]]]:
        return FeatureFile, (self.path, self.layout, self.faults)  # pickling the map would copy all features

    def missing(self) -> list[int]:
        """Indices of images without features."""
        return np.flatnonzero(np.asarray(self._sums) == 0).tolist()

    def read(self, index: int) -> Tensor:
        """Reads the features of an image.

        Shapes:
            (S, C)
        Raises:
            ImageError: The image could not be read when features were computed.
            UserError: The features are corrupted.
        """
        if self._sums[index] == 0:
            raise ImageError(self.faults.get(index, f"{self.path}: holds no features of image {index}"))
        values = np.array(self._rows[index])
        if checksum(values) != self._sums[index]:
            raise UserError(
                f"{self.path}: the features of image {index} are corrupted; check the disk and delete the file "
                "to create it again",
                1,
            )
        row = torch.from_numpy(values)
        return row.view(DTYPES[self.layout.dtype]).view(self.layout.states, self.layout.width)

    def check_free_space(self, images: int) -> None:
        """Checks that the disk has room for the features of `images` images.

        Raises:
            UserError: It does not.
        """
        needed, free = images * self.layout.row, shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise UserError(
                f"{self.path.parent}: the features of {images:,} images need {format_bytes(needed)}, but only "
                f"{format_bytes(free)} are free; free disk space, set runs to another folder, or set "
                "data.cache_features=false",
                1,
            )

    def write(self, indices: Sequence[int], features: Tensor) -> None:
        """Writes the features of images, then their checksums.

        Shapes:
            features (B, S, C) for B indices
        Raises:
            UserError: The file cannot be written.
        """
        rows = features.cpu().contiguous().view(len(indices), -1).view(torch.uint8).numpy()
        try:
            with open(self.path, "r+b", buffering=0) as file:
                for index, row in zip(indices, rows, strict=True):
                    _write_fully(file.fileno(), row.data, self.layout.start + index * self.layout.row)
                os.fsync(file.fileno())
                for index, row in zip(indices, rows, strict=True):
                    _write_fully(file.fileno(), checksum(row).astype(SUM).tobytes(), PAGE + SUM.itemsize * index)
        except OSError as error:
            raise unwritable_error(self.path, error) from error


def is_complete(folder: Path, layout: Layout) -> bool:
    """Returns True if a cache folder holds the features of all images of a layout."""
    try:
        return not FeatureFile(layout.path(folder), layout).missing()
    except UserError:
        return False


def open_features(folder: Path, layout: Layout) -> FeatureFile:
    """Opens the file of a layout in a cache folder; creates it if it is missing or invalid.

    Raises:
        UserError: The file cannot be written.
    """
    path = layout.path(folder)
    with suppress(UserError):
        return FeatureFile(path, layout)
    try:
        with atomic_write(path) as file:
            file.write(layout.header())
            file.truncate(layout.size)  # a sparse file, which uses no disk space yet
    except OSError as error:
        raise unwritable_error(path, error) from error
    return FeatureFile(path, layout)


def checksum(row: np.ndarray) -> np.uint32:
    """Checksum (CRC-32) of an image's features, never 0."""
    return np.uint32(zlib.crc32(row.data) or 1)


def format_bytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e7 else f"{count / 1e6:,.2f} MB"


def _write_fully(file: int, data: memoryview | bytes, at: int) -> None:
    """Writes all of `data`; the system may write less at once."""
    while data:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


class FeatureField(ImageField):
    """Replaces images by cached features of a frozen encoder.

    Args:
        images: The field that it replaces.
        file: The features of all images.
        first: Place in the file of the first image of each record, then the number of images.
        complete: Whether they are the encoder's states; see Features.
    Shapes:
        Features of values (B, S, C); of all images of the records in order
    """

    def __init__(self, images: ImageField, file: FeatureFile, first: np.ndarray, *, complete: bool) -> None:
        super().__init__(preprocess=images.preprocess, augment=images.augment)
        self.file, self.first, self.complete = file, first, complete

    def encode(self, record: Record, key: AugmentKey | None) -> Tensor:
        assert key is not None, "features are cached for training only"
        first, end = self.first[int(key[2]) :][:2].tolist()
        return self.collate([self.file.read(place)[None] for place in range(first, end)]).values

    def collate(self, values: Sequence[Tensor]) -> Any:
        layout = self.file.layout
        none = torch.empty(0, layout.states, layout.width, dtype=DTYPES[layout.dtype])
        return Features(torch.cat([none, *values]), complete=self.complete)
