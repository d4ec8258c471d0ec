"""Files of a cache: one process writes at a time, and a disk that is full ends in a line."""

from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path

from filelock import FileLock

from vlm.errors import UserError


def unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be written ({error.strerror}); make room, or set runs to another folder", 1)


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Holds the lock of a file: one process or thread at a time; on a file system without locks, none waits.

    Args:
        path: The file to write; one of this name with ``.lock`` after it stays beside it.
    Raises:
        UserError: The folder cannot be written to.
    """
    # A soft lock in the place of one that the file system lacks would stay for ever where its process is killed.
    lock = FileLock(path.with_name(f"{path.name}.lock"), fallback_to_soft=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        if error.errno not in (ENOLCK, ENOSYS, EOPNOTSUPP):
            raise unwritable(path, error) from error
    try:
        yield
    finally:
        lock.release()
