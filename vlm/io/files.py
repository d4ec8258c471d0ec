"""File helpers: atomic writes, arguments from stdin, a progress display, and the optional pyarrow package."""

import glob
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from vlm.errors import UserError

T = TypeVar("T")
PERMISSIONS = 0o644  # of written files; temporary files are created with 0o600


@contextmanager
def file_named_in_errors(path: Path) -> Iterator[Path]:
    """Context that adds the file name to OSErrors that lack it, such as those of a full disk."""
    try:
        yield path
    except OSError as fault:
        fault.filename = str(path)
        raise


@contextmanager
def atomic_write(path: str | os.PathLike, *, sync: bool = True, keep: Path | None = None) -> Iterator[BinaryIO]:
    """Context that writes a temporary file and renames it to the path at the end, so that no partial file is visible.

    Several processes may write the same path at the same time; the last rename wins.

    Args:
        sync: Whether to write the data to the disk before the rename, so that a power failure loses no file.
        keep: Path to keep the old file at; None to delete it. Readers always find a complete file at the path.
    Raises:
        OSError: The file cannot be written; the old file is unchanged, and the temporary file is removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.chmod(temporary, PERMISSIONS)
        if keep is not None:
            _keep_old_file(path, keep, f"{temporary}.old.tmp")
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # the original error says more
            Path(temporary).unlink(missing_ok=True)
        raise
    if sync:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically, without syncing it to the disk.

    Characters that UTF-8 cannot encode, such as those of undecodable file names, are escaped.

    Raises:
        OSError: It cannot be written; the error names the file.
    """
    with file_named_in_errors(path), atomic_write(path, sync=False) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Removes the temporary files of `atomic_write` that killed processes left in a folder."""
    for path in folder.glob(f".{name if name == '*' else glob.escape(name)}.*.tmp"):
        path.unlink(missing_ok=True)


def _keep_old_file(path: Path, keep: Path, temporary: str) -> None:
    """Renames a file to `keep`; `path` also refers to it until it is replaced."""
    try:
        os.link(path, temporary)
    except OSError:  # a file system without hard links; readers find no file until the next rename
        os.replace(path, keep)
        return
    os.replace(temporary, keep)
    with suppress(OSError):  # renaming one hard link to another of the same file does nothing
        Path(temporary).unlink(missing_ok=True)


def read_arguments(inputs: Sequence[str]) -> list[str]:
    """Returns command-line arguments with "-" replaced by the lines of stdin."""
    lines = [line.removesuffix("\n").removesuffix("\r") for line in sys.stdin] if "-" in inputs else []
    return [name for item in inputs for name in (filter(None, lines) if item == "-" else [item])]


def progress(items: Iterable[T], total: int, unit: str) -> Iterator[T]:
    """Yields the items and, on a terminal, shows count, rate and remaining time on stderr after the first second."""
    start = last_update = time.monotonic()
    is_terminal = sys.stderr.isatty()
    for done, item in enumerate(items):
        now = time.monotonic()
        if is_terminal and done and now - last_update > (0.5 if last_update > start else 1.0):
            last_update, rate = now, done / (now - start)
            minutes, seconds = divmod(int((total - done) / rate), 60)
            print(
                f"\r{done}/{total} {unit}  {rate:.1f}/s  {minutes}:{seconds:02d} left \033[K",
                end="",
                file=sys.stderr,
                flush=True,
            )
        yield item
    if last_update > start:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def require_pyarrow(what: str) -> None:
    """Checks that pyarrow is installed.

    Args:
        what: The file or option that requires it, for the message.
    Raises:
        UserError: It is not installed; the message says how to install it.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as fault:
        raise UserError(f'{what}: needs the package pyarrow; pip install "vlm-lightning[parquet]"') from fault
