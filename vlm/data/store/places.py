"""Places where the files of a data set lie: a folder, or a tar that is never unpacked."""

import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

from PIL import Image

from vlm.data.images.image import ImageError, load_image, read_bytes
from vlm.data.store.storage import stamp
from vlm.data.store.tar import Span, TarError, members, read_span
from vlm.errors import UserError


class Place(Protocol):
    """Files by path, parted by slashes.

    Attributes:
        path: The folder or the file that holds them.
    """

    path: Path

    def files(self) -> list[str]:
        """Path of each file."""

    def folders(self) -> list[str]:
        """Path of each folder."""

    def names(self, folder: str) -> Collection[str]:
        """Names of the files right in a folder."""

    def has(self, name: str) -> bool:
        """True where there is such a file."""

    def read(self, name: str) -> bytes:
        """The bytes of an image's file; an ImageError is raised where they cannot be read."""

    def image(self, name: str) -> Image.Image:
        """An image in RGB; an ImageError is raised for one that cannot be read."""

    def stamp(self, name: str) -> str:
        """A text that changes where the file does."""


class Folder:
    """A folder; names may lead out of it, as tables of images sometimes have them.

    Raises:
        UserError: A folder within it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names: dict[str, frozenset[str]] = {}

    def files(self) -> list[str]:
        return [path for folder, _, names in walk(self.path) for path in (folder + name for name in names)]

    def folders(self) -> list[str]:
        return [path for folder, folders, _ in walk(self.path) for path in (folder + name for name in folders)]

    def names(self, folder: str) -> Collection[str]:
        if folder not in self._names:  # to list a folder once is far faster than to ask for each file
            try:
                self._names[folder] = frozenset(os.listdir(os.path.join(self.path, folder)))
            except OSError:
                self._names[folder] = frozenset()
        return self._names[folder]

    def has(self, name: str) -> bool:
        folder, base = os.path.split(name)
        return base in self.names(folder) or os.path.exists(self.path / name)  # on disks that ignore case too

    def read(self, name: str) -> bytes:
        return read_bytes(self.path / name)

    def image(self, name: str) -> Image.Image:
        return load_image(self.path / name)

    def stamp(self, name: str) -> str:
        return stamp(str(self.path / name))


class Tar:
    """A tar that is not compressed. Its headers are read once; 60,000 take a second or two.

    Members that are no plain files, or whose names lead out of the archive, are passed over.

    Raises:
        UserError: It is no tar.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spans: dict[str, Span] = {}
        self._folders: list[str] = []
        try:
            with open(path, "rb") as file:
                for name, span in members(file):
                    if span is None:
                        self._folders.append(name)
                    else:
                        self._spans[name] = span
        except (OSError, TarError) as fault:
            raise UserError(
                f"{path}: cannot be read as a tar ({fault}); give one that is whole and not compressed (gunzip it)"
            ) from fault

    def files(self) -> list[str]:
        return list(self._spans)

    def folders(self) -> list[str]:
        return self._folders

    def names(self, folder: str) -> Collection[str]:
        return self._by_folder[folder]

    def has(self, name: str) -> bool:
        return name in self._spans

    def read(self, name: str) -> bytes:
        try:
            return read_span(str(self.path), self._spans[name])
        except (OSError, ValueError) as fault:
            raise ImageError(f"{self.path}/{name}: {getattr(fault, 'strerror', None) or fault}") from fault

    def image(self, name: str) -> Image.Image:
        return load_image(self.read(name), f"{self.path}/{name}")

    def stamp(self, name: str) -> str:
        return f"{self._written} {self._spans[name]}"

    @cached_property
    def _by_folder(self) -> dict[str, list[str]]:
        bases: dict[str, list[str]] = defaultdict(list)
        for name in self._spans:
            folder, base = os.path.split(name)
            bases[folder].append(base)
        return bases

    @cached_property
    def _written(self) -> str:
        return stamp(str(self.path))


def walk(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Each folder within a folder, its path with a slash after it, with its folders and files by name, sorted.

    Links to folders are followed, but not in circles; folders whose name begins with a dot are not entered.

    Raises:
        UserError: A folder cannot be read.
    """
    seen = {os.path.realpath(root)}
    for folder, folders, files in os.walk(root, onerror=_unreadable, followlinks=True):
        targets = {name: os.path.realpath(os.path.join(folder, name)) for name in folders if name[0] != "."}
        folders[:] = sorted(name for name, target in targets.items() if target not in seen)
        seen |= set(targets.values())
        inside = "" if folder == str(root) else os.path.relpath(folder, root).replace(os.sep, "/") + "/"
        yield inside, list(folders), sorted(files)


def _unreadable(error: OSError) -> None:
    raise UserError(f"{error.filename}: {error.strerror}; give a folder that can be read") from error
