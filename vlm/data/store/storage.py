"""Files on disk and in object stores, by path or URL (``s3://bucket/key``), read alike; and patterns of their names.

URLs are read by fsspec, which imports the package of a store, such as s3fs, where one is read.
"""

import glob
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from vlm.data.store import tar
from vlm.data.store.tar import Span
from vlm.errors import UserError
from vlm.io.atomic import atomic_write

MAX_EXPANDED = 1_000_000  # names that a pattern's braces may stand for
PIECE = 2**20  # bytes that are asked of a store at once where a file is read in order
PAUSES = (0.5, 2.0)  # seconds before a read from a store is tried again
_BRACES = re.compile(r"\{([^{},]*,[^{}]*|\d+\.\.\d+)\}")  # others are kept as they are, as in a shell
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAGIC = re.compile(r"[*?\[]")

T = TypeVar("T")


def is_url(path: str) -> bool:
    return "://" in path


def local(path: str) -> str:
    """A path or URL, less the ``file://`` of one that leads to this machine's own files."""
    return path.removeprefix("file://")


def check_place(path: str, setting: str, *, urls: bool) -> None:
    """Refuses a URL where none may be read.

    Args:
        path: A path or URL that `local` returned.
        setting: The key of the config that holds it.
        urls: Whether URLs may be read.
    Raises:
        UserError: It names the key and the remedy.
    """
    if is_url(path) and not urls:
        raise UserError(
            f"{setting}={path}: a checkpoint's config reaches no network by itself, for anybody may have written it\n"
            "if it is yours, say VLM_REMOTE=1 before the command"
        )


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.path.join(folder, name)


def size_of(path: str) -> int:
    """The size of a file in bytes; an OSError is raised where there is none."""
    return int(_remote(path, lambda fs, key: fs.size(key))) if is_url(path) else os.stat(path).st_size


def stamp(path: str) -> str:
    """A text that changes where a file is written anew: its size and, but for a store, the time of its change."""
    try:
        if is_url(path):
            return str(size_of(path))
        status = os.stat(path)
        return f"{status.st_size} {status.st_mtime_ns}"
    except OSError:
        return "absent"


def open_file(path: str) -> io.BufferedReader:
    """A file for reading, which can be sought in; an OSError is raised where there is none."""
    if is_url(path):
        return io.BufferedReader(_RemoteFile(path), buffer_size=PIECE)
    return open(path, "rb")


class _RemoteFile(io.RawIOBase):
    """A file of a store, of which each read asks for a range of bytes."""

    def __init__(self, url: str) -> None:
        self.url, self.size, self.at = url, size_of(url), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        start, end = self.at, min(self.at + len(buffer), self.size)
        data = _remote(self.url, lambda fs, key: fs.cat_file(key, start=start, end=end)) if start < end else b""
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def read_file(path: str, most: int) -> bytes:
    """The content of a file of no more than so many bytes.

    Raises:
        OSError: There is none, or it cannot be read.
        ValueError: It is larger.
    """
    with open_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"the file has more than {most:,} bytes")
    return data


def write_file(path: str, data: bytes) -> None:
    """Writes a file whole or not at all; a store shows an object once all of it was sent.

    Raises:
        OSError: It cannot be written.
    """
    if is_url(path):
        _remote(path, lambda fs, key: fs.pipe_file(key, data))
        return
    with atomic_write(path) as file:
        file.write(data)


def read_span(path: str, span: Span) -> bytes:
    """The content of a tar's member, as `vlm.data.store.tar.read_span` gives it."""
    if not is_url(path):
        return tar.read_span(path, span)
    tar.check_span(span)
    end = span.offset + span.size
    data = _remote(path, lambda fs, key: fs.cat_file(key, start=span.offset, end=end)) if span.size else b""
    if len(data) < span.size:
        raise ValueError("the tar ends within it")
    return data


def files_in(folder: str, suffix: str) -> list[str]:
    """The files of a folder whose names end so, sorted; none where there is no such folder."""
    try:
        names = _remote(folder, _names) if is_url(folder) else os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [join(folder, name) for name in sorted(names) if name.endswith(suffix) and name[0] != "."]


def _names(fs: Any, key: str) -> list[str]:
    return [path.rstrip("/").rpartition("/")[2] for path in fs.ls(key, detail=False)]


def expand(pattern: str) -> list[str]:
    """The files that a pattern stands for: braces as in a shell (``{000..127}``, ``{a,b}``), and ``*``, ``?``, ``[]``.

    Names that braces make are given whether or not there is such a file; those of the others are sorted.

    Raises:
        ValueError: The braces stand for too many.
    """
    if not is_url(pattern) and os.path.exists(pattern):
        return [pattern]
    names = list(islice(_braces(pattern), MAX_EXPANDED + 1))
    if len(names) > MAX_EXPANDED:
        raise ValueError(f"the braces stand for more than {MAX_EXPANDED:,} names")
    return list(dict.fromkeys(file for name in names for file in (_glob(name) if _MAGIC.search(name) else [name])))


def _braces(pattern: str) -> Iterator[str]:
    """The names for which the innermost braces stand, and then the others."""
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    for part in _alternatives(braces[1]):
        yield from _braces(pattern[: braces.start()] + part + pattern[braces.end() :])


def _alternatives(inside: str) -> Iterator[str]:
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        yield from inside.split(",")
        return
    first, last = int(numbers[1]), int(numbers[2])
    width = len(numbers[1]) if numbers[1][0] == "0" else 0
    for number in range(first, last + 1) if first <= last else range(first, last - 1, -1):
        yield f"{number:0{width}d}"


def _glob(pattern: str) -> list[str]:
    if not is_url(pattern):
        return sorted(glob.glob(pattern))
    return sorted(_remote(pattern, lambda fs, key: [_as_url(pattern, key, name) for name in fs.glob(key)]))


def _as_url(pattern: str, key: str, name: str) -> str:
    """A name that a store found for a pattern, written as the pattern is; key is how the store writes the pattern."""
    return pattern.removesuffix(key.lstrip("/")) + name.lstrip("/")


def _remote(url: str, act: Callable[[Any, str], T]) -> T:
    """The result of a call on a URL's file system, tried again where a store fails for a moment.

    Raises:
        OSError: It still fails, whatever the store's package raised.
        UserError: The store's package is not installed, or there is no such kind of store.
    """
    for pause in (*PAUSES, None):
        fs, key = _file_system(url)
        try:
            return act(fs, key)
        except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError):
            raise
        except Exception as fault:  # each store's package raises its own
            if pause is None:
                raise OSError(f"{type(fault).__name__}: {' '.join(str(fault).split())[:200]}") from fault
        time.sleep(pause)
    raise AssertionError("unreachable")


def _file_system(url: str) -> tuple[Any, str]:
    try:
        return url_to_fs(url)  # it keeps file systems by process, so that a worker has its own
    except ImportError as fault:
        raise UserError(
            f'{url}: needs a package that is not there ({fault}); pip install "vlm-lightning[shards]"'
        ) from fault
    except ValueError as fault:
        raise UserError(f"{url}: is in no store that can be read ({fault}); copy it to disk, and give its path") from (
            fault
        )
