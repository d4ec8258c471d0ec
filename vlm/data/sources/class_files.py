"""Images whose folders name their classes, wherever the files lie: what a folder and a tar of them share."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from PIL import Image

from vlm.data.images.image import SUFFIXES
from vlm.data.sources.caption_formats import SPLITS
from vlm.data.sources.class_source import stratified
from vlm.errors import UserError

NAMES = ("train", "val", "test")
_STRANGERS = ("__MACOSX",)  # what archives made on a Mac hold beside the files

Parts = tuple[str, ...]


class ClassFile(NamedTuple):
    """An image: its path within the data set, and its class."""

    path: str
    label: int


class ClassFiles:
    """A source of the images that a subclass lists and reads.

    The layout is ``train/CLASS/...`` with ``val`` and ``test`` (or another name of theirs) beside ``train``, or else
    ``CLASS/...``, of which val and test are drawn, each class keeping its share. A single folder around all of it does
    not matter; names that begin with a dot, and files without an image's suffix, are passed over.

    Args:
        place: What holds the files, for messages.
        setting: The key of the config that says it.
        files: Path of each file within it, parted by slashes.
        folders: Path of each folder, likewise.
        val_fraction, test_fraction: Parts held out for validation and for test where the layout says no splits.
        seed: Seed of which are held out.
    Attributes:
        splits: Those of ``train``, ``val`` and ``test`` that hold an image, in this order.
        classes: The names of the classes, sorted.
        skipped: A line for each folder with images that are not used.
    Raises:
        UserError: If there is no image, fewer than two classes, a class of train without images, or a class in val or
            test that train lacks.
    """

    def __init__(
        self,
        *,
        place: str,
        setting: str,
        files: Iterable[str],
        folders: Iterable[str],
        val_fraction: float,
        test_fraction: float,
        seed: int,
    ) -> None:
        if min(val_fraction, test_fraction) < 0 or not val_fraction + test_fraction < 1:
            raise UserError(
                f"data.source.val_fraction={val_fraction} and data.source.test_fraction={test_fraction}: "
                "give numbers from 0 whose sum is below 1"
            )
        self.place, self._setting = place, setting
        self.skipped: list[str] = []
        images = sorted(parts for parts in map(_shown, files) if parts and _is_image(parts[-1]))
        if not images:
            raise self._fault("holds no image of a known format")
        base = _wrapping(images)
        images = [parts[len(base) :] for parts in images]
        kept = [parts[len(base) :] for parts in map(_shown, folders) if parts[: len(base)] == base]
        self._base = "/".join((*base, ""))
        if _says_splits(images):
            self._images = self._named(images, kept)
        else:
            self._images = self._drawn(images, kept, val_fraction, test_fraction, seed)
        self.splits = tuple(name for name in NAMES if self._images.get(name))

    def read(self, path: str) -> Image.Image:
        """The image of this path within the data set, in RGB.

        Raises:
            ImageError: If it cannot be read.
        """
        raise TypeError(f"{type(self).__name__} reads no files")

    def content(self, path: str) -> bytes:
        """The bytes of the file of this path; an ImageError is raised where it cannot be read."""
        raise TypeError(f"{type(self).__name__} reads no files")

    def signature(self, path: str) -> str:
        """What changes where the file of this path does."""
        raise TypeError(f"{type(self).__name__} reads no files")

    def split(self, name: str) -> "ClassFilesSplit":
        """The split of this name.

        Raises:
            UserError: If there is no such split.
        """
        if name not in self.splits:
            raise UserError(f"{self.place} has no split {name!r}; it has {', '.join(self.splits)}")
        return ClassFilesSplit(self, self._images[name])

    def _named(self, images: list[Parts], folders: list[Parts]) -> dict[str, list[ClassFile]]:
        """The splits that the first folder of each path names."""
        found: dict[str, list[Parts]] = {name: [] for name in NAMES}
        strays = []
        for parts in images:
            split = SPLITS.get(parts[0].lower())
            if split and len(parts) > 2:
                found[split].append(parts)
            else:
                strays.append(parts)
        self._leave_out(strays, "not in a class folder of a split")
        if not found["train"]:
            raise self._fault(f"has {_listed(sorted({parts[0] for parts in images}))}, but no train folder")
        empty = {parts[:2] for parts in folders if len(parts) > 1 and SPLITS.get(parts[0].lower()) == "train"}
        self._set_classes({parts[1] for parts in found["train"]}, empty - {parts[:2] for parts in found["train"]})
        for parts in (parts for name in NAMES for parts in found[name] if parts[1] not in self._labels):
            raise UserError(
                f"{self.place}/{self._base}{'/'.join(parts[:2])}: the training images have no class {parts[1]!r}; "
                "rename the folder to the class it is, or add such images to train"
            )
        return {name: [self._file(parts, parts[1]) for parts in found[name]] for name in NAMES}

    def _drawn(
        self, images: list[Parts], folders: list[Parts], val_fraction: float, test_fraction: float, seed: int
    ) -> dict[str, list[ClassFile]]:
        """The splits by fractions of each class."""
        self._leave_out([parts for parts in images if len(parts) == 1], "in no class folder")
        images = [parts for parts in images if len(parts) > 1]
        if not images:
            raise self._fault("holds images, but none in a folder that names its class")
        empty = {parts[:1] for parts in folders if parts} - {parts[:1] for parts in images}
        self._set_classes({parts[0] for parts in images}, empty)
        rest = [self._file(parts, parts[0]) for parts in images]
        counts = {name: round(part * len(rest)) for name, part in (("test", test_fraction), ("val", val_fraction))}
        splits: dict[str, list[ClassFile]] = {}
        for name, count in counts.items():
            taken = set(stratified([f.label for f in rest], [f.path for f in rest], count, seed=seed))
            splits[name] = [file for index, file in enumerate(rest) if index in taken]
            rest = [file for index, file in enumerate(rest) if index not in taken]
        return splits | {"train": rest}

    def _set_classes(self, classes: set[str], empty: set[Parts]) -> None:
        if empty:
            path = f"{self.place}/{self._base}{'/'.join(min(empty))}"
            raise UserError(f"{path}: holds no image of a known format; add images, or remove the folder")
        if len(classes) < 2:
            raise self._fault(f"has one class alone, {min(classes)}, where there must be two or more")
        self.classes = sorted(classes)
        self._labels = {name: label for label, name in enumerate(self.classes)}

    def _file(self, parts: Parts, name: str) -> ClassFile:
        return ClassFile(self._base + "/".join(parts), self._labels[name])

    def _leave_out(self, strays: list[Parts], why: str) -> None:
        for folder, count in sorted(Counter("/".join(parts[:-1]) for parts in strays).items()):
            where = f"{self.place}/{self._base}{folder}".rstrip("/")
            self.skipped.append(f"{where}: {count} image{'s' * (count > 1)} {why}")

    def _fault(self, what: str) -> UserError:
        return UserError(
            f"{self.place}: {what}; set {self._setting} to where images lie as CLASS/IMAGE, or as train/CLASS/IMAGE "
            "and val/CLASS/IMAGE"
        )


class ClassFilesSplit:
    """One split, the same in every epoch."""

    fresh = False

    def __init__(self, source: ClassFiles, files: Sequence[ClassFile]) -> None:
        self.source, self.files = source, files

    def __len__(self) -> int:
        return len(self.files)

    def image(self, epoch: int, index: int) -> Image.Image:
        """The image in RGB; an ImageError is raised for one that cannot be read."""
        return self.source.read(self.files[index].path)

    def content(self, index: int) -> bytes:
        """The bytes of the image's file; an ImageError is raised where it cannot be read."""
        return self.source.content(self.files[index].path)

    def signature(self, index: int) -> str:
        return self.source.signature(self.files[index].path)

    def label(self, epoch: int, index: int) -> int:
        return self.files[index].label

    def sample_id(self, epoch: int, index: int) -> str:
        """The image's path within the data set."""
        return self.files[index].path


def _shown(path: str) -> Parts:
    """The parts of a path, none where it is hidden."""
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    return () if any(part[0] == "." or part in _STRANGERS for part in parts) else parts


def _is_image(name: str) -> bool:
    _, dot, suffix = name.rpartition(".")
    return dot + suffix.lower() in SUFFIXES


def _wrapping(images: Sequence[Parts]) -> Parts:
    """The folders that everything lies in, such as an archive's own, before those that mean something."""
    base: Parts = ()
    while True:
        rest = [parts[len(base) :] for parts in images]
        if len({parts[0] for parts in rest}) > 1 or min(map(len, rest)) < 3 or rest[0][0].lower() in SPLITS:
            return base
        base = (*base, rest[0][0])


def _says_splits(images: Sequence[Parts]) -> bool:
    """Whether the first folders are splits; a class may be called train too, but its images lie right in it."""
    splits = {SPLITS.get(parts[0].lower()) if len(parts) > 2 else None for parts in images}
    return "train" in splits or None not in splits


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
