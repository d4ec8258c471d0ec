"""Helpers for cache files: a lock between processes, and an error message for failed writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path

from filelock import FileLock

from vlm.errors import UserError


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
