"""Keeps training if the reader of its output exits, as in `python train.py | head`."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class PipedOutput:
    """A text stream that discards its output once the reader of the pipe has exited.

    Args:
        stream: The wrapped stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._run(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._run(self._stream.flush)

    def _run(self, action: Callable[[], int | None]) -> int | None:
        """Runs an action; on a broken pipe, redirects the stream to the null device."""
        try:
            return action()
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            return None


@contextmanager
def tolerate_broken_pipes() -> Iterator[None]:
    """Context in which a broken pipe of stdout or stderr does not end the training."""
    before: Any = sys.stdout, sys.stderr
    after: Any = PipedOutput(sys.stdout), PipedOutput(sys.stderr)
    sys.stdout, sys.stderr = after
    try:
        yield
    finally:
        for stream in after:
            stream.flush()
        sys.stdout, sys.stderr = before
