"""What files in a cache have in common: one process writes, and a disk that is full ends in a line."""

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
    """Lets one process at a time pass; on a file system without locks all do, which costs no more than time."""
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
        os.close(lock)  # and with it the lock
