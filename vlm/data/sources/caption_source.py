"""The base of sources of captioned images: images, splits, and what becomes of those that cannot be used."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vlm.data.hold_out import check_fractions, draw, held_out
from vlm.data.images.image import SUFFIXES
from vlm.data.records import NAMES, Listed, Record, Skipped, Source, Split, first_fault, is_lenient
from vlm.data.sources.caption_tables import Row
from vlm.data.sources.column_images import FolderWithTables, within
from vlm.data.store.columns import is_columns
from vlm.data.store.places import Place, Tar
from vlm.errors import UserError, nearest
from vlm.randomness import numpy_rng

# A few files lost are a nuisance; more than that, and the folder is the wrong one.
MAX_ABSENT = 0.01


@dataclass(slots=True)
class CaptionedImage:
    """An image: its name, unique in the source, its path within the place, its split, and its captions or questions.

    Of several images that belong together, the paths of those after the first are in `more`.
    """

    name: str
    path: str
    split: str | None
    captions: dict[Any, None] = field(default_factory=dict)  # a set that keeps the order
    more: Sequence[str] = ()

    @property
    def paths(self) -> list[str]:
        return [self.path, *self.more]


def drawn_captions(captions: list[Any], most: int | None, *keys: int | str) -> list[Any]:
    """The captions that a row is trained on: all, or as many as asked for, drawn for these keys."""
    if most is None or len(captions) <= most:
        return captions
    order = numpy_rng("captions", *keys).permutation(len(captions))
    return [captions[at] for at in sorted(order[:most])]


class CaptionSource(Source):
    """A source reads its text files when it is made, and no image before it is asked for.

    A subclass calls `_add` with the rows of each file and then `_finish`. What cannot be used is never dropped in
    silence: it has a line in `skipped`, and a fault that would spoil the whole is an error.

    Args:
        root: The data set's folder, or a tar of it.
        seed: Seed of which images are held out and which captions are drawn.
        captions_per_image: The most captions of an image that an epoch of ``train`` uses; None for all.
        column: Name of the column of images, where a table may hold them.
    Attributes:
        text: Noun for the text that a row has.
        separator: Parts the names of several images that belong together; None where each stands alone.
        place: Holds the images.
        base: Folder within it that the names of images are relative to.
    Raises:
        UserError: There is no such folder.
    """

    holds = ("image", "captions")
    text = "caption"
    separator: str | None = None

    def __init__(self, *, root: str, seed: int, captions_per_image: int | None, column: str = "image") -> None:
        self.root, self.base = Path(root), ""
        self.place = _place(self.root, column)
        self.seed, self.captions_per_image = seed, captions_per_image
        self.skipped: list[str] = []
        self.repeated: list[str] = []
        self._by_path: dict[str, CaptionedImage] = {}
        self._named: set[str] = set()
        self._images: dict[str, list[CaptionedImage]] = {}

    def open(self, name: str) -> Split:
        most = self.captions_per_image if name == "train" else None
        return Listed(self._images[name], partial(self._record, most))

    def _record(self, most: int | None, image: CaptionedImage, epoch: int) -> Record:
        captions = list(image.captions)
        known = {"captions": drawn_captions(captions, most, self.seed, epoch, image.name), "references": captions}
        first, *more = (partial(self.place.image, path) for path in image.paths)
        return Record(image.name, known, first, partial(self.place.read, image.path), partial(self._stamp, image), more)

    def _stamp(self, image: CaptionedImage) -> str:
        return " ".join(map(self.place.stamp, image.paths))

    def _add(self, rows: Iterable[Row], file: Path, folder: str = "", split: str | None = None) -> None:
        """Takes the rows of a file, equal ones merged.

        Args:
            file: Where they come from.
            folder: Folder of the place that their images are relative to.
            split: The split of all of them, whatever they say themselves.
        Raises:
            UserError: If an image is in two splits, or what is to be trained on says that it is held out.
        """
        named: dict[str, CaptionedImage] = {}
        for row in rows:
            name, place = row.image.strip(), split or row.split
            caption = row.caption.strip() if isinstance(row.caption, str) else row.caption
            if split == "train" and row.split in ("val", "test"):
                raise UserError(held_out(file, row.where, row.split))
            if not name or not caption:
                line = f"{file}, {row.where}: {f'no {self.text}' if name else 'names no image'}"
                self.skipped.append(Skipped(line, "empty caption" if name else "no image"))
                continue
            image = named.get(name) or named.setdefault(name, self._image(os.path.join(folder, name), place))
            if image.split != place:
                self._refuse(
                    f"{file}, {row.where}: {name} is in two splits, {image.split or 'none'} and {place or 'none'}; "
                    "all captions of an image must be in the same",
                    "two splits",
                )
            if caption in image.captions:
                self.repeated.append(f"{file}, {row.where}: {name} has this caption already: {caption}")
            image.captions[caption] = None

    def _refuse(self, message: str, kind: str) -> None:
        """A fault that would spoil a run: an error, unless all faults are being looked for."""
        if not is_lenient():
            raise UserError(message)
        self.skipped.append(Skipped(message, kind))

    def uncaptioned(self) -> list[str]:
        folders = {os.path.dirname(path) for path in self._named}
        files = (os.path.join(folder, name) for folder in folders for name in self.place.names(folder))
        images = (path for path in files if os.path.splitext(path)[1].lower() in SUFFIXES)
        return sorted(str(self.place.path / path) for path in images if path not in self._named)

    def _image(self, path: str, split: str | None) -> CaptionedImage:
        """The image of this file, or files, known by its path, so that a.jpg and ./a.jpg are the same."""
        paths = [within(part.strip(), self.root) for part in (path.split(self.separator) if self.separator else [path])]
        self._named.update(paths)
        joined = " ".join(paths)
        image = self._by_path.get(joined)
        if image is None:
            name = joined.removeprefix(f"{self.base}/") if self.base else joined
            image = self._by_path[joined] = CaptionedImage(name.replace(os.sep, "/"), paths[0], split, more=paths[1:])
        return image

    def _finish(self, file: Path, val_fraction: float = 0.0, test_fraction: float = 0.0) -> None:
        """Makes the splits: as the images say, or else by fractions.

        Raises:
            UserError: If some images say a split and others do not, too many are absent, or nothing is left.
        """
        images = list(self._by_path.values())
        unsaid = [image for image in images if image.split is None]
        if unsaid and len(unsaid) < len(images):
            raise UserError(f"{file}: {unsaid[0].name} has no split, others have; give each or none of them one")
        if unsaid:
            self._hold_out(images, val_fraction, test_fraction)
        images = self._present(images, file)
        if not images:
            raise UserError(
                f"{file}: holds no image with a {self.text}{first_fault(self.skipped)}; check data.root and data.path"
            )
        kept = {name: [image for image in images if image.split == name] for name in NAMES}
        self._images = {name: images for name, images in kept.items() if images}
        self.splits = tuple(self._images)

    def _hold_out(self, images: list[CaptionedImage], val_fraction: float, test_fraction: float) -> None:
        check_fractions(val_fraction, test_fraction)
        fractions = {"val": val_fraction, "test": test_fraction}
        for split, indices in draw([image.name for image in images], fractions, self.seed).items():
            for index in indices:
                images[index].split = split

    def _present(self, images: list[CaptionedImage], file: Path) -> list[CaptionedImage]:
        """The images that are there; the others are named in `skipped`."""
        missing = {image.name: [path for path in image.paths if not self.place.has(path)] for image in images}
        absent = [str(self.place.path / path) for paths in missing.values() for path in paths]
        if len(absent) > MAX_ABSENT * len(images) and not is_lenient():
            raise UserError(
                f"{file}: {len(absent)} of {len(images)} images are not there, such as {', '.join(absent[:3])}; "
                f"set data.root (now {self.root}) to the folder that their names are relative to"
            )
        self.skipped += [Skipped(f"{path}: named in {file}, but not there", "no image") for path in absent]
        return [image for image in images if not missing[image.name]]


def _place(root: Path, column: str) -> Place:
    if root.is_file() and root.suffix == ".tar":
        return Tar(root)
    if root.is_file():
        raise UserError(f"data.root={root}: is a file; give its folder as data.root, and the file as data.path")
    if not root.is_dir():
        raise UserError(f"data.root={root}: no such folder; set data.root to where the data set is")
    return FolderWithTables(root, column)


def find_file(path: str, root: Path, setting: str) -> Path:
    """A file, or a folder of files stored by columns, as given or else within the root.

    Raises:
        UserError: If it is in neither place.
    """
    for candidate in (Path(path), root / path):
        if candidate.is_file() or is_columns(candidate):
            return candidate
    folders = [place.parent for place in (Path(path), root / path) if place.parent.is_dir()]
    files = {file.name: file for folder in folders for file in folder.iterdir()}
    near = files.get(nearest(Path(path).name, files))
    remedy = f"did you mean {near}?" if near else f"set {setting} to the file"
    raise UserError(f"{setting}={path}: no such file, nor {root / path}; {remedy}")
