"""Features that a frozen encoder makes of the images of a split, in one file that is mapped into memory.

A page of header that says what the file holds; a checksum for each image, 0 where its features are not there; the
features, an image's end to end with the next one's. The checksum is written when the features are on disk: whenever a
process is killed, what it had done is there, and is known to be; and a disk that changes a bit is found out.
"""

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

from vlm.data.images.image import ImageError
from vlm.data.store.cache_file import unwritable
from vlm.errors import UserError
from vlm.io.atomic import atomic_write

MAGIC = b"VLMFEATS"
VERSION = 2  # of the format, and of how features are made
PAGE = 4096
SUM = np.dtype("<u4")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Layout:
    """The content of a file of features.

    Args:
        source: Tells encoder, images and transform from all others.
        images: Number of images.
        states, width: The shape (S, C) of an image's features.
        dtype: Of a feature, as torch names it.
    """

    source: str
    images: int
    states: int
    width: int
    dtype: str

    @property
    def row(self) -> int:
        """Bytes of an image's features."""
        return self.states * self.width * DTYPES[self.dtype].itemsize

    @property
    def start(self) -> int:
        """Offset of the features, at a page's begin."""
        return PAGE + -(-self.images * SUM.itemsize // PAGE) * PAGE

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.start + self.images * self.row

    def path(self, folder: Path) -> Path:
        """Path of a file of this layout in a cache."""
        digest = blake2b(self.header(), digest_size=16).hexdigest()
        return folder / f"train-{digest}.features"

    def header(self) -> bytes:
        return MAGIC + json.dumps({"version": VERSION, **asdict(self)}, sort_keys=True).encode()

    def __str__(self) -> str:
        return f"{self.images:,} images x {self.states} x {self.width} {self.dtype}, {gigabytes(self.size)}"


class FeatureFile:
    """Features of images, on disk until they are read.

    Args:
        path: A file that `create` made.
        layout: What it has to hold.
        faults: Why images could not be read, by index, of which it therefore holds no features.
    Raises:
        UserError: There is no such file, or it is of another layout or size.
    """

    def __init__(self, path: Path, layout: Layout, faults: dict[int, str] | None = None) -> None:
        self.path, self.layout, self.faults = path, layout, faults or {}
        header = layout.header()
        try:
            with open(path, "rb") as file:
                whole = file.read(PAGE).rstrip(b"\0") == header and os.fstat(file.fileno()).st_size == layout.size
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; give a file of features") from error
        if not whole:
            raise UserError(f"{path}: is no whole file of these features; remove it, and it is written anew")
        self._sums = np.memmap(path, SUM, "r", PAGE, (layout.images,))
        self._rows = np.memmap(path, np.uint8, "r", layout.start, (layout.images, layout.row))

    def __reduce__(self) -> Any:
        return FeatureFile, (self.path, self.layout, self.faults)  # a pickled map would hold all features

    def missing(self) -> list[int]:
        """The images whose features are not there."""
        return np.flatnonzero(np.asarray(self._sums) == 0).tolist()

    def read(self, index: int) -> Tensor:
        """The features of an image.

        Shapes:
            (S, C)
        Raises:
            ImageError: It could not be read when features were made.
            UserError: They are not those that were written.
        """
        if self._sums[index] == 0:
            raise ImageError(self.faults.get(index, f"{self.path}: holds no features of image {index}"))
        values = np.array(self._rows[index])
        if checksum(values) != self._sums[index]:
            raise UserError(
                f"{self.path}: the features of image {index} are not those that were written; check the disk, remove "
                "the file, and they are made anew",
                1,
            )
        row = torch.from_numpy(values)
        return row.view(DTYPES[self.layout.dtype]).view(self.layout.states, self.layout.width)

    def check_room(self, images: int) -> None:
        """Refuses to write the features of so many images where there is no room for them.

        Raises:
            UserError: There is not.
        """
        needed, free = images * self.layout.row, shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise UserError(
                f"{self.path.parent}: the features of {images:,} images take {gigabytes(needed)}, "
                f"{gigabytes(free)} are free; make room, set runs to another folder, or data.cache_features=false",
                1,
            )

    def write(self, indices: Sequence[int], features: Tensor) -> None:
        """Writes the features of images, and then that they are there.

        Shapes:
            features (B, S, C), B the number of indices
        Raises:
            UserError: The file cannot be written.
        """
        rows = features.cpu().contiguous().view(len(indices), -1).view(torch.uint8).numpy()
        try:
            with open(self.path, "r+b", buffering=0) as file:
                for index, row in zip(indices, rows, strict=True):
                    _write(file.fileno(), row.data, self.layout.start + index * self.layout.row)
                os.fsync(file.fileno())
                for index, row in zip(indices, rows, strict=True):
                    _write(file.fileno(), checksum(row).astype(SUM).tobytes(), PAGE + SUM.itemsize * index)
        except OSError as error:
            raise unwritable(self.path, error) from error


def is_complete(folder: Path, layout: Layout) -> bool:
    """True for a cache that holds the features of all images of a layout."""
    try:
        return not FeatureFile(layout.path(folder), layout).missing()
    except UserError:
        return False


def open_features(folder: Path, layout: Layout) -> FeatureFile:
    """The file of a layout in a cache, made where there is none, or one that is not whole.

    Raises:
        UserError: It cannot be written.
    """
    path = layout.path(folder)
    with suppress(UserError):
        return FeatureFile(path, layout)
    create(path, layout)
    return FeatureFile(path, layout)


def create(path: Path, layout: Layout) -> None:
    """Makes a file of no features yet; it takes up no room before they are written."""
    try:
        with atomic_write(path) as file:
            file.write(layout.header())
            file.truncate(layout.size)
    except OSError as error:
        raise unwritable(path, error) from error


def checksum(row: np.ndarray) -> np.uint32:
    """A number that tells bytes from others, never 0: a change of up to 32 bits in a row never goes unseen."""
    return np.uint32(zlib.crc32(row.data) or 1)


def gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e7 else f"{count / 1e6:,.2f} MB"


def _write(file: int, data: memoryview | bytes, at: int) -> None:
    """Writes all of it: the system may take less at once."""
    while data:
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
