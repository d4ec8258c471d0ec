"""Files of a cache: one process writes at a time, and a disk that is full ends in a line."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vlm.errors import UserError


def unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be written ({error.strerror}); make room, or set runs to another folder", 1)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Lets one process or thread at a time pass; on a file system without locks all do, which costs no more than time.

    Args:
        path: The file to write; one of this name with ``.lock`` after it stays beside it.
    Raises:
        UserError: The folder cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_CREAT | os.O_WRONLY)
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # closing alone would not do: a process that was forked meanwhile has the file open too
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
