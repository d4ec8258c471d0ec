"""Keeps a training running when the reader of its output is gone."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class PipedOutput:
    """A text stream that discards what is written once its reader is gone, as in `python train.py | head`.

    Args:
        stream: The wrapped stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._tried(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def _tried(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._stream.fileno())
            os.close(nothing)


@contextmanager
def readers_may_leave() -> Iterator[None]:
    """Keeps a broken pipe of stdout or stderr from ending a training."""
    before: Any = sys.stdout, sys.stderr
    after: Any = PipedOutput(sys.stdout), PipedOutput(sys.stderr)
    sys.stdout, sys.stderr = after
    try:
        yield
    finally:
        for stream in after:
            stream.flush()
        sys.stdout, sys.stderr = before
