"""Files: atomic writes, command arguments that are files, and the optional Parquet package."""

import glob
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from vlm.errors import UserError

PERMISSIONS = 0o644  # the usual ones; a temporary file is readable by its owner only


@contextmanager
def file_named_in_errors(path: Path) -> Iterator[Path]:
    """Context that adds the file's name to write errors, some of which only say that the disk is full."""
    try:
        yield path
    except OSError as fault:
        fault.filename = str(path)
        raise


@contextmanager
def atomic_write(path: str | os.PathLike, *, sync: bool = True, keep: Path | None = None) -> Iterator[BinaryIO]:
    """Context that writes a temporary file and renames it to the path at the end; if killed, the old file is intact.

    Several processes may write the same path at once; the last rename wins, and each file is complete.

    Args:
        sync: Whether the data reach the disk before the rename, so that the old file also survives a power cut.
        keep: New name of the old file; None to replace it. Readers always find a complete file at the path.
    Raises:
        OSError: The file cannot be written; the old one is untouched, and no temporary file is left.
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
    """Writes a text file atomically.

    It is not synced: logs and reports are written often, and a power cut costs only their last version.

    Characters without UTF-8 form, such as in some file names, are escaped.

    Raises:
        OSError: It cannot be written; the error names the file.
    """
    with file_named_in_errors(path), atomic_write(path, sync=False) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Removes temporary files of killed processes from a folder: those of one file name, or all."""
    for left in folder.glob(f".{name if name == '*' else glob.escape(name)}.*.tmp"):
        left.unlink(missing_ok=True)


def _keep(path: Path, keep: Path, temporary: str) -> None:
    """Renames path to keep; path still refers to the file until it is replaced."""
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


def listed(inputs: Sequence[str]) -> list[str]:
    """The arguments, with "-" replaced by the lines of stdin."""
    lines = [line.removesuffix("\n").removesuffix("\r") for line in sys.stdin] if "-" in inputs else []
    return [name for item in inputs for name in (filter(None, lines) if item == "-" else [item])]


def progress(items: Iterable[Any], total: int, unit: str) -> Iterator[Any]:
    """Yields the items; on a terminal, stderr shows after a second how many are done, the rate, and the time left."""
    start = shown = time.monotonic()
    visible = sys.stderr.isatty()
    for done, item in enumerate(items):
        now = time.monotonic()
        if visible and done and now - shown > (0.5 if shown > start else 1.0):
            shown, rate = now, done / (now - start)
            left = int((total - done) / rate)
            print(
                f"\r{done}/{total} {unit}  {rate:.1f}/s  {left // 60}:{left % 60:02d} left \033[K",
                end="",
                file=sys.stderr,
                flush=True,
            )
        yield item
    if shown > start:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def require_pyarrow(what: str) -> None:
    """Checks that pyarrow is installed.

    Args:
        what: The file or option that needs it, for the message.
    Raises:
        UserError: It is not installed; the message says how to install it.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as fault:
        raise UserError(f'{what}: needs the package pyarrow; pip install "vlm-lightning[parquet]"') from fault
