"""What all sources of captioned images share: images, splits, and what becomes of those that cannot be used."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from PIL import Image

from vlm.data.images.image import SUFFIXES, load_image, read_bytes
from vlm.data.sources.caption_formats import Row, Skipped
from vlm.data.store.storage import stamp
from vlm.errors import UserError
from vlm.randomness import key, numpy_rng

NAMES = ("train", "val", "test")
# A few files lost are a nuisance; more than that, and the folder is the wrong one.
MAX_ABSENT = 0.01

_lenient: ContextVar[bool] = ContextVar("lenient", default=False)


@contextmanager
def lenient() -> Iterator[None]:
    """Sources that are made within it go on after faults that would spoil a run, to find all of them at once."""
    token = _lenient.set(True)
    try:
        yield
    finally:
        _lenient.reset(token)


def is_lenient() -> bool:
    """Whether faults are being looked for, within `lenient`."""
    return _lenient.get()


@dataclass(slots=True)
class CaptionedImage:
    """An image: its name, unique in the source, its file, its split where the data says one, and its captions."""

    name: str
    path: str
    split: str | None
    captions: dict[str, None] = field(default_factory=dict)  # a set that keeps the order


class CaptionSplit:
    """One split of a source; the same in every epoch, save for which captions of an image are drawn.

    Args:
        images: What it holds.
        seed: Seed of the drawing of captions.
        captions_per_image: The most captions of an image that `captions` gives, drawn in each epoch; None for all.
    """

    fresh = False

    def __init__(self, *, images: list[CaptionedImage], seed: int = 0, captions_per_image: int | None = None) -> None:
        self.images = images
        self.seed = seed
        self.captions_per_image = captions_per_image

    def __len__(self) -> int:
        return len(self.images)

    def path(self, index: int) -> Path:
        """The image's file."""
        return Path(self.images[index].path)

    def content(self, index: int) -> bytes:
        """The bytes of the image's file; an ImageError is raised where it cannot be read."""
        return read_bytes(self.path(index))

    def image(self, epoch: int, index: int) -> Image.Image:
        """The image in RGB.

        Raises:
            ImageError: If it cannot be read.
        """
        return load_image(self.path(index))

    def signature(self, index: int) -> str:
        """What changes where the image's file does."""
        return stamp(self.images[index].path)

    def captions(self, epoch: int, index: int) -> list[str]:
        """The captions a row is trained on: all, or as many of them as asked for."""
        captions = self.references(index)
        if self.captions_per_image is None or len(captions) <= self.captions_per_image:
            return captions
        rng = numpy_rng("captions", self.seed, epoch, self.sample_id(epoch, index))
        return [captions[at] for at in sorted(rng.permutation(len(captions))[: self.captions_per_image])]

    def references(self, index: int) -> list[str]:
        """All captions of the image, in the order of the file."""
        return list(self.images[index].captions)

    def sample_id(self, epoch: int, index: int) -> str:
        """The image's name as the data set has it, unique in the source."""
        return self.images[index].name


class CaptionSource:
    """A source reads its text files when it is made, and no image before it is asked for.

    A subclass calls `_add` with the rows of each file and then `_finish`. What cannot be used is never dropped in
    silence: it has a line in `skipped`, and a fault that would spoil the whole is an error.

    Args:
        root: The data set's folder.
        seed: Seed of which images are held out and which captions are drawn.
        captions_per_image: The most captions of an image that an epoch of ``train`` uses; None for all.
    Attributes:
        splits: Those of ``train``, ``val`` and ``test`` that hold an image, in this order.
        skipped: One line for each image or caption that is not used because of a fault.
        repeated: One line for each caption that an image has twice, of which one is used.
        base: Folder that the names of images are relative to.
    Raises:
        UserError: If there is no such folder.
    """

    name = ""

    def __init__(self, *, root: str, seed: int, captions_per_image: int | None) -> None:
        self.root = self.base = Path(root)
        self.seed = seed
        self.captions_per_image = captions_per_image
        self.splits: tuple[str, ...] = ()
        self.skipped: list[str] = []
        self.repeated: list[str] = []
        self._found: dict[str, CaptionedImage] = {}
        self._named: set[str] = set()
        self._images: dict[str, list[CaptionedImage]] = {}
        if captions_per_image is not None and captions_per_image < 1:
            raise UserError(f"data.source.captions_per_image={captions_per_image}: give at least 1, or null for all")
        if self.root.is_file():
            raise UserError(f"data.root={root}: is a file; give its folder as data.root, and the file as data.path")
        if not self.root.is_dir():
            raise UserError(f"data.root={root}: no such folder; set data.root to where the data set is")

    def split(self, name: str) -> CaptionSplit:
        """The split of this name.

        Raises:
            UserError: If there is no such split.
        """
        if name not in self.splits:
            raise UserError(f"{self.root} has no split {name!r}; it has {', '.join(self.splits)}")
        drawn = self.captions_per_image if name == "train" else None
        return CaptionSplit(images=self._images[name], seed=self.seed, captions_per_image=drawn)

    def _add(self, rows: Iterable[Row], file: Path, folder: Path, split: str | None = None) -> None:
        """Takes the rows of a file, equal ones merged.

        Args:
            file: Where they come from.
            folder: What their images are relative to.
            split: The split of all of them, whatever they say themselves.
        Raises:
            UserError: If an image is in two splits.
        """
        named: dict[str, CaptionedImage] = {}
        for row in rows:
            name, caption, place = row.image.strip(), row.caption.strip(), split or row.split
            if not name or not caption:
                said = f"{file}, {row.where}: {'no caption' if name else 'names no image'}"
                self.skipped.append(Skipped(said, "empty caption" if name else "no image"))
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
        """The image files that no caption names, in the folders of those that are named; sorted."""
        named = {os.path.normpath(path) for path in self._named}
        folders = {os.path.dirname(path) for path in named}
        files = (
            os.path.join(folder, name) for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)
        )
        images = (path for path in files if os.path.splitext(path)[1].lower() in SUFFIXES)
        return sorted(path for path in images if path not in named)

    def _image(self, path: str, split: str | None) -> CaptionedImage:
        """The image of this file, known by its path, so that a.jpg and ./a.jpg are the same."""
        path = os.path.normpath(path)
        self._named.add(path)
        image = self._found.get(path)
        if image is None:
            name = path.removeprefix(os.path.join(os.path.normpath(self.base), ""))
            image = self._found[path] = CaptionedImage(name.replace(os.sep, "/"), path, split)
        return image

    def _finish(self, file: Path, val_fraction: float = 0.0, test_fraction: float = 0.0) -> None:
        """Makes the splits: as the images say, or else by fractions.

        Raises:
            UserError: If some images say a split and others do not, too many are absent, or nothing is left.
        """
        images = list(self._found.values())
        unsaid = [image for image in images if image.split is None]
        if unsaid and len(unsaid) < len(images):
            raise UserError(f"{file}: {unsaid[0].name} has no split, others have; give each or none of them one")
        if unsaid:
            self._hold_out(images, val_fraction, test_fraction)
        images = self._present(images, file)
        if not images:
            why = f" ({len(self.skipped)} faults; the first: {self.skipped[0]})" if self.skipped else ""
            raise UserError(f"{file}: holds no image with a caption{why}; check data.root and data.path")
        kept = {name: [image for image in images if image.split == name] for name in NAMES}
        self._images = {name: images for name, images in kept.items() if images}
        self.splits = tuple(self._images)

    def _hold_out(self, images: list[CaptionedImage], val_fraction: float, test_fraction: float) -> None:
        """Draws splits by a hash of each image's name, so that an image keeps its own when others are added."""
        if min(val_fraction, test_fraction) < 0 or not val_fraction + test_fraction < 1:
            raise UserError(
                f"data.source.val_fraction={val_fraction} and data.source.test_fraction={test_fraction}: "
                "give numbers from 0 whose sum is below 1"
            )
        for image in images:
            at = key("split", self.seed, image.name) / 2**63
            image.split = "val" if at < val_fraction else "test" if at < val_fraction + test_fraction else "train"

    def _present(self, images: list[CaptionedImage], file: Path) -> list[CaptionedImage]:
        """The images that are there; the others are named in `skipped`."""
        exists = finder()
        absent = [image for image in images if not exists(image.path)]
        if len(absent) > MAX_ABSENT * len(images) and not is_lenient():
            first = ", ".join(image.path for image in absent[:3])
            raise UserError(
                f"{file}: {len(absent)} of {len(images)} images are not there, such as {first}; "
                f"set data.root (now {self.root}) to the folder that their names are relative to"
            )
        self.skipped += [Skipped(f"{image.path}: named in {file}, but not there", "no image") for image in absent]
        gone = {image.path for image in absent}
        return [image for image in images if image.path not in gone]


def finder() -> Callable[[str], bool]:
    """Tells whether a file is there; it lists each folder once, which is far faster than asking for each file."""

    @cache
    def names(folder: str) -> frozenset[str]:
        try:
            return frozenset(os.listdir(folder or "."))
        except OSError:
            return frozenset()

    def exists(path: str) -> bool:
        folder, name = os.path.split(path)
        return name in names(folder) or os.path.exists(path)  # asked all the same, for file systems that ignore case

    return exists


def find_file(path: str, root: Path, setting: str) -> Path:
    """A file as given, or else within the root.

    Raises:
        UserError: If it is in neither place.
    """
    for candidate in (Path(path), root / path):
        if candidate.is_file():
            return candidate
    raise UserError(f"{setting}={path}: no such file, nor {root / path}; set {setting} to the file")
