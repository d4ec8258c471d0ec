"""What files in a cache have in common: one process writes, and a disk that is full ends in a line."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vlm.data.store import locks
from vlm.errors import UserError


def unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be written ({error.strerror}); make room, or set runs to another folder", 1)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Lets one process at a time pass, as `locks.alone`.

    Raises:
        UserError: The folder cannot be written to.
    """
    with ExitStack() as held:
        try:
            held.enter_context(locks.alone(path))
        except OSError as error:
            raise unwritable(path, error) from error
        yield
