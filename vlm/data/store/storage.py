"""Access to files on disk and in object stores, by name or pattern, and to members of tars; locks of cache files."""

import glob
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from vlm.data.images.image import MAX_BYTES
from vlm.errors import UserError
from vlm.io.files import atomic_write
from vlm.untrusted.tars import Span

MAX_EXPANDED = 1_000_000  # maximum number of names from a pattern's braces
PIECE = 2**20  # bytes per request when a file is read sequentially
PAUSES = (0.5, 2.0)  # seconds before a failed read is repeated
_BRACES = re.compile(r"\{([^{},]*,[^{}]*|\d+\.\.\d+)\}")  # other braces are literal, as in a shell
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAGIC = re.compile(r"[*?\[]")

T = TypeVar("T")


def is_url(path: str) -> bool:
    return "://" in path


def strip_file_scheme(path: str) -> str:
    """Removes ``file://`` from a URL of a local file."""
    return path.removeprefix("file://")


def join_path(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.path.join(folder, name)


def get_file_size(path: str) -> int:
    """Size of a file in bytes; raises OSError if it does not exist."""
    return int(_call_store(path, lambda fs, key: fs.size(key))) if is_url(path) else os.stat(path).st_size


def get_file_stamp(path: str) -> str:
    """A string that changes when a file is rewritten: its size and, for local files, its modification time."""
    try:
        if is_url(path):
            return str(get_file_size(path))
        status = os.stat(path)
        return f"{status.st_size} {status.st_mtime_ns}"
    except OSError:
        return "absent"


def open_file(path: str) -> io.BufferedReader:
    """Opens a seekable file for reading; raises OSError if it does not exist."""
    if is_url(path):
        return io.BufferedReader(_RemoteFile(path), buffer_size=PIECE)
    return open(path, "rb")


class _RemoteFile(io.RawIOBase):
    """A remote file; each read requests a range of bytes."""

    def __init__(self, url: str) -> None:
        self.url, self.size, self.at = url, get_file_size(url), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        start, end = self.at, min(self.at + len(buffer), self.size)
        data = _call_store(self.url, lambda fs, key: fs.cat_file(key, start=start, end=end)) if start < end else b""
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def read_file(path: str, max_bytes: int) -> bytes:
    """Reads a file of at most `max_bytes` bytes.

    Raises:
        OSError: It does not exist or cannot be read.
        ValueError: It is larger.
    """
    with open_file(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"the file has more than {max_bytes:,} bytes")
    return data


def write_file(path: str, data: bytes) -> None:
    """Writes a file atomically; object stores show an object only when it is complete.

    Raises:
        OSError: The file cannot be written.
    """
    if is_url(path):
        _call_store(path, lambda fs, key: fs.pipe_file(key, data))
        return
    with atomic_write(path) as file:
        file.write(data)


def list_files(folder: str, suffix: str) -> list[str]:
    """Files of a folder with this suffix, sorted; empty if the folder does not exist."""
    try:
        if is_url(folder):
            paths = _call_store(folder, lambda fs, key: fs.ls(key, detail=False))
            names = [path.rstrip("/").rpartition("/")[2] for path in paths]
        else:
            names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [join_path(folder, name) for name in sorted(names) if name.endswith(suffix) and name[0] != "."]


def expand_pattern(pattern: str) -> list[str]:
    """Expands a pattern: braces as in a shell (``{000..127}``, ``{a,b}``), and ``*``, ``?``, ``[]``.

    Names from braces need not exist; matches of wildcards are sorted.

    Raises:
        ValueError: The braces expand to too many names.
    """
    if not is_url(pattern) and os.path.exists(pattern):
        return [pattern]
    names = list(islice(_expand_braces(pattern), MAX_EXPANDED + 1))
    if len(names) > MAX_EXPANDED:
        raise ValueError(f"the braces expand to more than {MAX_EXPANDED:,} names")
    return list(dict.fromkeys(file for name in names for file in _expand_wildcards(name)))


def _expand_braces(pattern: str) -> Iterator[str]:
    """Expands braces, innermost first."""
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    for part in _alternatives(braces[1]):
        yield from _expand_braces(pattern[: braces.start()] + part + pattern[braces.end() :])


def _alternatives(inside: str) -> Iterator[str]:
    numbers = _RANGE.fullmatch(inside)
    if numbers is None:
        yield from inside.split(",")
        return
    first, last = int(numbers[1]), int(numbers[2])
    width = len(numbers[1]) if numbers[1][0] == "0" else 0
    for number in range(first, last + 1) if first <= last else range(first, last - 1, -1):
        yield f"{number:0{width}d}"


def _expand_wildcards(pattern: str) -> list[str]:
    if not _MAGIC.search(pattern):
        return [pattern]
    if not is_url(pattern):
        return sorted(glob.glob(pattern))

    def find(fs: AbstractFileSystem, key: str) -> list[str]:
        scheme = pattern.removesuffix(key.lstrip("/"))  # a store returns names without it
        return [scheme + name.lstrip("/") for name in fs.glob(key)]

    return sorted(_call_store(pattern, find))


def _call_store(url: str, act: Callable[[AbstractFileSystem, str], T]) -> T:
    """Calls a function on a URL's file system and retries on temporary errors.

    Raises:
        OSError: It still fails, whatever the store's package raised.
        UserError: The store's package is not installed, or the type of store is unknown.
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


def _file_system(url: str) -> tuple[AbstractFileSystem, str]:
    try:
        return url_to_fs(url)  # cached per process, so each worker has its own
    except ImportError as fault:
        raise UserError(
            f'{url}: needs a package that is not installed ({fault}); pip install "vlm-lightning[shards]"'
        ) from fault
    except ValueError as fault:
        raise UserError(f"{url}: is not in a supported store ({fault}); copy it to disk, and give its path") from (
            fault
        )


def check_span(span: Span) -> None:
    """Checks the size of a member.

    Raises:
        ValueError: It is too large.
    """
    if span.size > MAX_BYTES:
        raise ValueError(f"the file has {span.size:,} bytes; at most {MAX_BYTES:,} are allowed")


def read_local_span(path: str, span: Span) -> bytes:
    """The content of a member.

    Raises:
        ValueError: It is too large, or the tar is truncated inside this file.
        OSError: The tar cannot be read.
    """
    check_span(span)
    # Opened for each image: it takes microseconds, and workers share no file position.
    with open(path, "rb", buffering=0) as file:
        file.seek(span.offset)
        data = file.read(span.size) or b""
    if len(data) < span.size:
        raise ValueError("the tar is truncated inside this file")
    return data


def read_span(path: str, span: Span) -> bytes:
    """The content of a tar member on disk or in a store, see `read_local_span`."""
    if not is_url(path):
        return read_local_span(path, span)
    check_span(span)
    end = span.offset + span.size
    data = _call_store(path, lambda fs, key: fs.cat_file(key, start=span.offset, end=end)) if span.size else b""
    if len(data) < span.size:
        raise ValueError("the tar is truncated inside this file")
    return data


def unwritable_error(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be written ({error.strerror}); free disk space, or set runs to another folder", 1)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Locks a file against other processes and threads; has no effect on file systems without locks.

    Args:
        path: The file to lock; the lock file, with suffix ``.lock``, is not deleted.
    Raises:
        UserError: The folder cannot be written to.
    """
    # No soft lock as a fallback: it would stay forever if its process is killed.
    lock = FileLock(path.with_name(f"{path.name}.lock"), fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        if error.errno not in (ENOLCK, ENOSYS, EOPNOTSUPP):
            raise unwritable_error(path, error) from error
    try:
        yield
    finally:
        lock.release()
