"""Base of sources of captioned images: images, splits, and handling of unusable entries."""

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar, Unpack

from vlm.data.hold_out import check_fractions, draw_splits, wrong_split_message
from vlm.data.images.image import SUFFIXES, read_image_size
from vlm.data.records import (
    NAMES,
    ListSplit,
    Record,
    RowChecker,
    SkipMessage,
    Source,
    Split,
    error_summary,
    report_error,
)
from vlm.data.sources.caption_tables import FolderWithTables, Row, relative_to_root
from vlm.data.sources.tables import Cells, ReadOptions, read_table
from vlm.data.store.places import FileStore, Tar
from vlm.data.text.words import to_single_line
from vlm.errors import UserError
from vlm.randomness import numpy_rng

T = TypeVar("T")

# If more images than this share are missing, the folder is probably the wrong one.
MAX_MISSING = 0.01


@dataclass(slots=True)
class CaptionedImage:
    """An image: its id, its path within the data set, its split, and its captions or questions.

    If several images belong together, `more` has the paths of all but the first. An entry without an image has an empty
    path.
    """

    name: str
    path: str
    split: str | None
    captions: dict[Hashable, None] = field(default_factory=dict)  # an ordered set
    more: Sequence[str] = ()

    @property
    def paths(self) -> list[str]:
        """Paths of its images; empty for an entry without one."""
        return [self.path, *self.more] if self.path else []


def choose_captions(captions: list[T], limit: int | None, *keys: int | str) -> list[T]:
    """The captions to train on: all, or a random choice of `limit` captions determined by the keys."""
    if limit is None or len(captions) <= limit:
        return captions
    order = numpy_rng("captions", *keys).permutation(len(captions))
    return [captions[at] for at in sorted(order[:limit])]


class CaptionSource(Source):
    """Base of sources of captioned images. It reads text files on creation, and images on demand.

    A subclass calls `_add` with the rows of each file, then `_finish`. Nothing is dropped silently: an unusable entry
    is listed in `skipped`, and a serious fault raises an error.

    Args:
        root: The data set's folder, or a tar of it.
        seed: Seed of the held-out images and of the choice of captions.
        captions_per_image: Maximum number of captions per image in an epoch of ``train``; None for all.
        column: Name of the image column, for tables that contain images.
    Attributes:
        text: Noun for the text of a row, for messages.
        empty: Message for a row without it; default "no TEXT".
        separator: Separates the names of several images of one entry; None for one image each.
        keeps_texts: Whether rows without an image are used, each as an entry of its own.
        place: Storage of the images.
        base: Folder in it that image names are relative to.
    Raises:
        UserError: The folder does not exist.
    """

    holds = ("image", "captions")
    text = "caption"
    empty = ""
    separator: str | None = None
    keeps_texts = False

    def __init__(self, *, root: str, seed: int, captions_per_image: int | None, column: str = "image") -> None:
        self.root, self.base = Path(root), ""
        self.place = _open_store(self.root, column)
        self.seed, self.captions_per_image = seed, captions_per_image
        self.skipped: list[str] = []
        self.repeated: list[str] = []
        self.notes: list[str] = []
        self._by_path: dict[str, CaptionedImage] = {}
        self._named: set[str] = set()
        self._images: dict[str, list[CaptionedImage]] = {}

    def open(self, name: str) -> Split:
        most = self.captions_per_image if name == "train" else None
        return ListSplit(self._images[name], partial(self._record, most))

    def _record(self, most: int | None, image: CaptionedImage, epoch: int) -> Record:
        captions = list(image.captions)
        values = {"captions": choose_captions(captions, most, self.seed, epoch, image.name), "references": captions}
        if not image.paths:
            return Record(image.name, values)
        first, *more = (partial(self.place.image, path) for path in image.paths)
        read_file = partial(self.place.read, image.path)
        return Record(
            image.name,
            values,
            first,
            read_file,
            lambda: " ".join(map(self.place.stamp, image.paths)),
            more,
            lambda: [read_image_size(self.place.read(path), path) for path in image.paths],
        )

    def _add(self, rows: Iterable[Row], file: Path, folder: str = "", split: str | None = None) -> None:
        """Adds the rows of a file; equal captions are merged.

        Args:
            file: The file.
            folder: Folder that its image names are relative to.
            split: Split of all rows, overriding their own.
        Raises:
            UserError: An image is in two splits, or a training row is marked as another split.
        """
        named: dict[str, CaptionedImage] = {}
        for row in rows:
            name, row_split = row.image.strip(), split or row.split
            caption = to_single_line(row.caption) if isinstance(row.caption, str) else row.caption
            if split == "train" and row.split in ("val", "test"):
                self._refuse(wrong_split_message(file, row.position, row.split), "two splits")
            if not name and caption and self.keeps_texts:
                where = f"{relative_to_root(str(file), self.root)}, {row.position}"
                entry = self._by_path[where] = CaptionedImage(where, "", row_split)
                entry.captions[caption] = None
                continue
            if not name or not caption:
                line = f"{file}, {row.position}: {(self.empty or f'no {self.text}') if name else 'names no image'}"
                self.skipped.append(SkipMessage(line, "empty caption" if name else "no image"))
                self._mention(name, folder)
                continue
            quoted_name = " and ".join(name.split(self.separator)) if self.separator else name
            image = named.get(name) or named.setdefault(name, self._image(os.path.join(folder, name), row_split))
            if image.split != row_split:
                self._refuse(
                    f"{file}, {row.position}: {quoted_name} is in two splits, {image.split or 'none'} and "
                    f"{row_split or 'none'}; all captions of an image must be in the same",
                    "two splits",
                )
            if caption in image.captions:
                self.repeated.append(f"{file}, {row.position}: repeats a {self.text} of {quoted_name}: {caption}")
            image.captions[caption] = None

    def _add_tables(
        self,
        files: Mapping[str, Path],
        columns: Mapping[str, str],
        convert: Callable[[Cells], Iterable[Row]],
        **options: Unpack[ReadOptions],
    ) -> None:
        """Adds the rows of the table of each split, or of a single table with all splits.

        Args:
            files: Table by split.
            columns: Column name by name of the value.
            convert: Converts the cells of a row; raises RowError if they are invalid.
            options: See `read_cells`.
        """
        keys = {f"{name}_column": column for name, column in columns.items()}
        for split, file in files.items():
            rows = read_table(RowChecker(file, self), keys, convert, **options)
            self._add(rows, file, split=split if len(files) > 1 else None)

    def _refuse(self, message: str, kind: str) -> None:
        """Raises an error, or records it inside `collect_errors`."""
        report_error(message)
        self.skipped.append(SkipMessage(message, kind))

    def find_uncaptioned_images(self) -> list[str]:
        folders = {os.path.dirname(path) for path in self._named}
        files = (os.path.join(folder, name) for folder in folders for name in self.place.names(folder))
        images = (path for path in files if os.path.splitext(path)[1].lower() in SUFFIXES)
        return sorted(str(self.place.path / path) for path in images if path not in self._named)

    def _mention(self, name: str, folder: str = "") -> list[str]:
        """The normalised paths of an image name, or of several; `find_uncaptioned_images` leaves them out."""
        names = (name.split(self.separator) if self.separator else [name]) if name else []
        paths = [relative_to_root(os.path.join(folder, part.strip()), self.root) for part in names]
        self._named.update(paths)
        return paths

    def _image(self, path: str, split: str | None) -> CaptionedImage:
        """The entry of this image file (or files), by normalised path, so that a.jpg and ./a.jpg are the same."""
        paths = self._mention(path)
        joined = " ".join(paths)
        image = self._by_path.get(joined)
        if image is None:
            name = joined.removeprefix(f"{self.base}/") if self.base else joined
            image = self._by_path[joined] = CaptionedImage(name.replace(os.sep, "/"), paths[0], split, more=paths[1:])
        return image

    def _finish(self, file: Path, val_fraction: float = 0.0, test_fraction: float = 0.0) -> None:
        """Creates the splits, from the images' own splits or else by fractions.

        Raises:
            UserError: Only some images have a split, too many images are missing, or none is left.
        """
        images = list(self._by_path.values())
        without_split = [image for image in images if image.split is None]
        if without_split and len(without_split) < len(images):
            report_error(
                f"{file}: {without_split[0].name} has no split, but other images have one; set it for all or none"
            )
            for image in without_split:
                image.split = "train"
        elif without_split:
            self._hold_out(images, val_fraction, test_fraction)
        images = self._drop_missing(images, file)
        if not images:
            raise UserError(
                f"{file}: has no image with a {self.text}{error_summary(self.skipped)}; check data.root and data.path"
            )
        by_split = {name: [image for image in images if image.split == name] for name in NAMES}
        self._images = {name: images for name, images in by_split.items() if images}
        self.splits = tuple(self._images)

    def _hold_out(self, images: list[CaptionedImage], val_fraction: float, test_fraction: float) -> None:
        check_fractions(val_fraction, test_fraction)
        fractions = {"val": val_fraction, "test": test_fraction}
        for split, indices in draw_splits([image.name for image in images], fractions, self.seed).items():
            for index in indices:
                images[index].split = split

    def _drop_missing(self, images: list[CaptionedImage], file: Path) -> list[CaptionedImage]:
        """The images that exist; missing ones are listed in `skipped`."""
        missing = {image.name: [path for path in image.paths if not self.place.has(path)] for image in images}
        self.skipped += check_missing(
            self.place, [path for paths in missing.values() for path in paths], len(images), file, self.root
        )
        return [image for image in images if not missing[image.name]]


def check_missing(place: FileStore, paths: Sequence[str], total: int, file: Path, root: Path) -> list[SkipMessage]:
    """Messages about images that a file names and that do not exist.

    Args:
        place: Storage of the images.
        paths: Paths of the missing images in it.
        total: Number of images that the file names.
        file: The file.
        root: Folder that names are relative to.
    Raises:
        UserError: More than MAX_MISSING of the images are missing.
    """
    similar = _similar_names(place, paths)
    if len(paths) > MAX_MISSING * total:
        if any(path.startswith(("http:/", "https:/")) for path in paths):
            report_error(f"{file}: contains URLs instead of file names; download the images first")
        else:
            examples = ", ".join(str(place.path / path) for path in paths[:3])
            path, name = next(iter(similar.items()), ("", ""))
            remedy = f"set data.root (now {root}) to the folder that their names are relative to"
            if name:
                remedy = f"{(place.path / path).parent} has {name}, so correct the names in the file"
            report_error(f"{file}: {len(paths)} of {total} images are missing, such as {examples}; {remedy}")
    hints = {path: f"; there is {name}" for path, name in similar.items()}
    lines = (f"{place.path / path}: listed in {file}, but missing{hints.get(path, '')}" for path in paths)
    return [SkipMessage(line, "missing image") for line in lines]


def _similar_names(place: FileStore, paths: Sequence[str]) -> dict[str, str]:
    """Images in the same folder whose names differ in upper and lower case, or in the suffix; by missing path."""
    folders = {os.path.dirname(path) for path in paths}
    names = {folder: {name.lower(): name for name in place.names(folder)} for folder in folders}
    similar: dict[str, str] = {}
    for path in paths:
        folder, name = os.path.split(path)
        stem, suffix = os.path.splitext(name.lower())
        candidates = (stem + ending for ending in (suffix, *sorted(SUFFIXES)) if suffix in SUFFIXES)
        if near := next((candidate for candidate in candidates if candidate in names[folder]), None):
            similar[path] = names[folder][near]
    return similar


def _open_store(root: Path, column: str) -> FileStore:
    if root.is_file() and root.suffix == ".tar":
        return Tar(root)
    if root.is_file():
        raise UserError(f"data.root={root}: is a file; set data.root to its folder and data.path to the file")
    if not root.is_dir():
        raise UserError(f"data.root={root}: no such folder; set data.root to the data set's folder")
    return FolderWithTables(root, column)
