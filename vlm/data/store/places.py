"""Storage of a data set's files: a folder, or a tar that is never unpacked."""

import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Protocol

from PIL import Image

from vlm.data.images.image import ImageError, load_image, read_bytes
from vlm.data.store.columns import is_columnar
from vlm.data.store.storage import get_file_stamp, read_local_span
from vlm.errors import UserError, find_similar
from vlm.untrusted.tars import Span, TarError, iter_members


class FileStore(Protocol):
    """Access to files by path, with slashes as separators.

    Attributes:
        path: The folder or archive.
    """

    path: Path

    def files(self) -> list[str]:
        """Paths of all files."""

    def folders(self) -> list[str]:
        """Paths of all folders."""

    def names(self, folder: str) -> Collection[str]:
        """Names of the files directly in a folder."""

    def has(self, name: str) -> bool:
        """Returns True if the file exists."""

    def read(self, name: str) -> bytes:
        """The bytes of an image file; raises ImageError if it cannot be read."""

    def image(self, name: str) -> Image.Image:
        """An image in RGB; raises ImageError if it cannot be read."""

    def stamp(self, name: str) -> str:
        """A string that changes when the file changes."""


class Folder:
    """A folder. Names may point outside of it, because image tables sometimes do.

    Raises:
        UserError: A subfolder cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names: dict[str, frozenset[str]] = {}

    def files(self) -> list[str]:
        return [path for folder, _, names in walk_folders(self.path) for path in (folder + name for name in names)]

    def folders(self) -> list[str]:
        return [path for folder, folders, _ in walk_folders(self.path) for path in (folder + name for name in folders)]

    def names(self, folder: str) -> Collection[str]:
        if folder not in self._names:  # listing a folder once is much faster than checking each file
            try:
                self._names[folder] = frozenset(os.listdir(os.path.join(self.path, folder)))
            except OSError:
                self._names[folder] = frozenset()
        return self._names[folder]

    def has(self, name: str) -> bool:
        folder, base = os.path.split(name)
        return base in self.names(folder) or os.path.exists(self.path / name)  # for case-insensitive file systems

    def read(self, name: str) -> bytes:
        return read_bytes(self.path / name)

    def image(self, name: str) -> Image.Image:
        return load_image(self.path / name)

    def stamp(self, name: str) -> str:
        return get_file_stamp(str(self.path / name))


class Tar:
    """An uncompressed tar. Its headers are read once; 60,000 take a second or two.

    Members that are not regular files, or whose names point outside of the archive, are ignored.

    Raises:
        UserError: It is not a tar.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spans: dict[str, Span] = {}
        self._folders: list[str] = []
        try:
            with open(path, "rb") as file:
                for name, span in iter_members(file):
                    if span is None:
                        self._folders.append(name)
                    else:
                        self._spans[name] = span
        except (OSError, TarError) as fault:
            raise UserError(
                f"{path}: cannot be read as a tar ({fault}); give a complete, uncompressed one (gunzip it)"
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
            return read_local_span(str(self.path), self._spans[name])
        except (OSError, ValueError) as fault:
            raise ImageError(f"{self.path}/{name}: {getattr(fault, 'strerror', None) or fault}") from fault

    def image(self, name: str) -> Image.Image:
        return load_image(self.read(name), f"{self.path}/{name}")

    def stamp(self, name: str) -> str:
        return f"{self._archive_stamp} {self._spans[name]}"

    @cached_property
    def _by_folder(self) -> dict[str, list[str]]:
        bases: dict[str, list[str]] = defaultdict(list)
        for name in self._spans:
            folder, base = os.path.split(name)
            bases[folder].append(base)
        return bases

    @cached_property
    def _archive_stamp(self) -> str:
        return get_file_stamp(str(self.path))


def walk_folders(root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields each folder with its path (and a trailing slash), its subfolders and its files, sorted.

    Follows links to folders, but not cycles; skips hidden folders.

    Raises:
        UserError: A folder cannot be read.
    """
    visited = {os.path.realpath(root)}
    for folder, folders, files in os.walk(root, onerror=_raise_unreadable, followlinks=True):
        targets = {name: os.path.realpath(os.path.join(folder, name)) for name in folders if name[0] != "."}
        folders[:] = sorted(name for name, target in targets.items() if target not in visited)
        visited |= set(targets.values())
        inside = "" if folder == str(root) else os.path.relpath(folder, root).replace(os.sep, "/") + "/"
        yield inside, list(folders), sorted(files)


def _raise_unreadable(error: OSError) -> None:
    raise UserError(f"{error.filename}: {error.strerror}; give a readable folder") from error


def find_file(path: str, root: Path | None, setting: str) -> Path:
    """Finds a file, or a folder of columnar files, by its path as given or relative to the root.

    Args:
        root: The data set's folder; None if there is none.
        setting: The config key of the path, for the message.
    Raises:
        UserError: It does not exist, or is another folder.
    """
    given = Path(path)
    candidates = [given] if root is None or given.is_relative_to(root) else [given, root / path]
    for candidate in candidates:
        if candidate.is_file() or is_columnar(candidate):
            return candidate
    if any(candidate.is_dir() for candidate in candidates):
        raise UserError(f"{setting}={path}: is a folder without tables; give a file")
    folders = [candidate.parent for candidate in candidates if candidate.parent.is_dir()]
    files = {file.name: file for folder in folders for file in folder.iterdir()}
    near = files.get(find_similar(given.name, files))
    remedy = f"did you mean {near}?" if near else f"set {setting} to the file"
    also = f", nor {candidates[1]}" if len(candidates) > 1 else ""
    raise UserError(f"{setting}={path}: no such file{also}; {remedy}")
