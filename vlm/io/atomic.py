"""Files that are written whole or not at all, with errors that say which file."""

import glob
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PERMISSIONS = 0o644  # as other files have them; a temporary file is its owner's alone


@contextmanager
def file_named_in_errors(path: Path) -> Iterator[Path]:
    """Names the file in an error of writing it, which says only that the disk is full."""
    try:
        yield path
    except OSError as fault:
        fault.filename = str(path)
        raise


@contextmanager
def atomic_write(path: str | os.PathLike, *, sync: bool = True, keep: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write beside a path, renamed to it at the end: a kill at any moment leaves the old one whole.

    Several processes may write the same path at once; the last rename wins, and each file is whole.

    Args:
        sync: Whether the data reach the disk before the rename, so that a power cut leaves the old one whole too.
        keep: New name of the old file; by default it is gone. Readers always find a whole file at the path.
    Raises:
        OSError: The file cannot be written; the old one is untouched, and nothing is left beside it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.chmod(beside, PERMISSIONS)
        if keep is not None:
            _keep(path, keep, f"{beside}.old.tmp")
        os.replace(beside, path)
    except BaseException:
        _remove(Path(beside))
        raise
    if sync:
        _sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Writes a text file whole or not at all.

    Logs and reports are written often, and a power cut costs no more than their last version: they are not synced.

    What is no UTF-8, as a file's name may be, is escaped.

    Raises:
        OSError: It cannot be written; it names the file.
    """
    with file_named_in_errors(path), atomic_write(path, sync=False) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Removes the temporary files of killed processes from a folder: those for a file of this name, or all."""
    for left in folder.glob(f".{name if name == '*' else glob.escape(name)}.*.tmp"):
        left.unlink(missing_ok=True)


def _keep(path: Path, keep: Path, temporary: str) -> None:
    """Renames path to keep, except that path still names the file until something replaces it."""
    try:
        os.link(path, temporary)
    except OSError:  # a file system without hard links; readers find no file until the next rename
        os.replace(path, keep)
        return
    os.replace(temporary, keep)
    _remove(Path(temporary))  # a rename onto another name of the same file does nothing


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # the error that is being raised says more
        return
