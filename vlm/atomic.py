"""Writing a run's files: whole or not at all, with errors that say which file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def named(path: Path) -> Iterator[Path]:
    """Names the file in an error of writing it, which says only that the disk is full."""
    try:
        yield path
    except OSError as fault:
        fault.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a file beside its place and renames it into it, so that what stood there stays until all is written.

    What is no UTF-8, as a file's name may be, is escaped.

    Raises:
        OSError: It cannot be written; it names the file.
    """
    beside = path.with_name(f"{path.name}.tmp")
    with named(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
                file.write(text)
            os.replace(beside, path)
        except BaseException:
            _remove(beside)
            raise


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # the error that is being raised says more
        return
