"""Letting one process at a time do what all of them would do."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Lets one process or thread at a time pass; on a file system without locks all do, which costs no more than time.

    Args:
        path: What it is about; a file of this name with ``.lock`` after it stays beside it.
    Raises:
        OSError: The folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_CREAT | os.O_WRONLY)
    try:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # closing alone would not do: a process that was forked meanwhile has the file open too
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
