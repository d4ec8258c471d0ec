"""User errors: the exception, its printing, and ranges of arguments."""

import errno
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
MAX_LINE = 1500  # characters of a line of a message
_MEMORY = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc")


class UserError(Exception):
    """An error that the user can fix.

    The message is one or two lines that name the file or key, the problem and the remedy. Control characters in quoted
    text are escaped.

    Args:
        message: Printed after ``error: ``.
        status: Exit status: 2 for invalid usage, config or checkpoint; 1 for a problem of the input or the machine.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__("\n".join(map(_shorten, printable_lines(message).split("\n"))))
        self.status = status


class SharedError(UserError):
    """An error that every rank raises; only rank zero prints it."""


class Limit:
    """A condition on an argument's value, used in its annotation.

    Config checks evaluate it, and print it after the type.
    """

    def holds(self, value: Any) -> bool:
        raise TypeError(f"{type(self).__name__} does not implement holds")


@dataclass(frozen=True)
class Range(Limit):
    """Range of a finite number: ``dropout: Annotated[float, Range(0, 1)]``. Values of other types pass.

    Args:
        low: Minimum.
        high: Maximum.
        above: Exclusive minimum.
        below: Exclusive maximum.
        also: A value outside of the range with a special meaning, such as -1 for "no limit".
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    also: float | None = None

    def holds(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or value == self.also:
            return True
        low = value > self.above if self.above is not None else self.low is None or value >= self.low
        high = value < self.below if self.below is not None else self.high is None or value <= self.high
        return math.isfinite(value) and low and high

    def __str__(self) -> str:
        words = {"at least": self.low, "above": self.above, "at most": self.high, "below": self.below}
        bounds = " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)
        return bounds if self.also is None else f"{bounds}, or {self.also}"


Count = Annotated[int, Range(1)]
Share = Annotated[float, Range(0, 1)]
Rate = Annotated[float, Range(0, below=1)]

INJECTED = "injected"
# An argument that is not part of the config: the program passes it when it builds the class.
Injected = Annotated[T, INJECTED]


def find_similar(name: str, names: Iterable[str]) -> str:
    """The most similar name, ignoring case, or an empty string."""
    by_lower_case = {candidate.lower(): candidate for candidate in sorted(names, reverse=True)}
    alike = get_close_matches(name.lower(), by_lower_case, n=1)
    return by_lower_case[alike[0]] if alike else ""


def did_you_mean(name: str) -> str:
    """Returns the end of a message, if there is a similar name."""
    return f"; did you mean {name}?" if name else ""


def unknown_choice(name: str, value: str, choices: Sequence[str]) -> UserError:
    """Returns the error for a value that is not one of an option's choices."""
    *first, last = choices
    listed = f"{', '.join(first)} or {last}"
    return UserError(f"{name}: {value!r} is unknown; choose {listed}{did_you_mean(find_similar(value, choices))}")


def _shorten(line: str) -> str:
    """Removes the middle of a very long line, such as one that quotes a damaged file; the end holds the remedy."""
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 3 :]}"


def excerpt(text: str) -> str:
    """Shortens a long text for a message."""
    return text if len(text) <= 60 else f"{text[:50]} ..."


def printable(text: str) -> str:
    """Escapes line breaks and control characters."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """Escapes control characters, keeping line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def print_error(message: object, kind: str = "error") -> None:
    """Prints an error on stderr; further lines are indented, so that a newline in a name cannot fake another error.

    Args:
        kind: "error", "warning" or "note".
    """
    print(f"{kind}:", printable_lines(str(message)).replace("\n", "\n  "), file=sys.stderr, flush=True)


def iter_causes(fault: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, its cause, the cause of that, and so on."""
    while fault is not None:
        yield fault
        fault = fault.__cause__ or (None if fault.__suppress_context__ else fault.__context__)


def is_out_of_memory(fault: BaseException) -> bool:
    """Returns True if an exception means out of memory, on the host or a device."""
    chain = list(iter_causes(fault))
    if any(isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM for error in chain):
        return True
    text = "\n".join(map(str, chain)).lower()
    return any(type(error).__name__ == "OutOfMemoryError" for error in chain) or (
        any(isinstance(error, RuntimeError) for error in chain) and any(words in text for words in _MEMORY)
    )
