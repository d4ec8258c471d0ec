"""Faults of a user as lines of text: the exception, its printing, and the bounds of arguments that they set."""

import errno
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
_MEMORY = ("not enough memory", "can't allocate memory", "cannot allocate memory", "out of memory", "bad_alloc")


class UserError(Exception):
    """Something a user can put right.

    The message is one or two lines: it names the file or key, says what is wrong with it, and gives the remedy. What it
    quotes of files and their names sends no commands to a terminal.

    Args:
        message: What is printed after ``error: ``.
        status: Exit status of the process: 2 for wrong usage, config or checkpoint; 1 for a fault of input or machine.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(printable_lines(message))
        self.status = status


class SharedError(UserError):
    """A fault that every rank raises alike; only rank zero prints it."""


class Limit:
    """A condition on an argument's value that its type does not state; it stands in the annotation.

    The check of a config reads it there, and prints it as the text that follows the type.
    """

    def holds(self, value: Any) -> bool:
        raise TypeError(f"{type(self).__name__} holds nothing")


@dataclass(frozen=True)
class Range(Limit):
    """Bounds of a finite number: ``dropout: Annotated[float, Range(0, 1)]``. Values of other types pass.

    Args:
        low: Least value.
        high: Greatest value.
        above: Excluded lower bound.
        below: Excluded upper bound.
        also: A value outside of the bounds with a meaning of its own, such as -1 for "no end".
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
# An argument that no config sets: the program supplies it where it builds the class.
Injected = Annotated[T, INJECTED]


def nearest(name: str, names: Iterable[str]) -> str:
    """The most alike of the names, or nothing; capitals count for little."""
    known = {known.lower(): known for known in sorted(names, reverse=True)}
    alike = get_close_matches(name.lower(), known, n=1)
    return known[alike[0]] if alike else ""


def did_you_mean(name: str) -> str:
    """The end of a message, where there is a nearest name."""
    return f"; did you mean {name}?" if name else ""


def excerpt(text: str) -> str:
    """A text as a message quotes it: its beginning, where it is long."""
    return text if len(text) <= 60 else f"{text[:50]} ..."


def printable(text: str) -> str:
    """Text that stays on one line and sends no commands to a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    """Lines that send no commands to a terminal."""
    return "\n".join(map(printable, text.split("\n")))


def print_error(message: object, kind: str = "error") -> None:
    """Prints a fault on stderr; further lines are indented, so that no name that holds a newline forges a second one.

    Args:
        kind: "error" or "warning".
    """
    print(f"{kind}:", printable_lines(str(message)).replace("\n", "\n  "), file=sys.stderr, flush=True)


def causes(fault: BaseException | None) -> Iterator[BaseException]:
    """A fault, its cause, the cause of that, and so on."""
    while fault is not None:
        yield fault
        fault = fault.__cause__ or (None if fault.__suppress_context__ else fault.__context__)


def is_interrupt(error: BaseException | None) -> bool:
    """True for an error that a Ctrl-C became on its way; OmegaConf hides what an error came from."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def is_out_of_memory(fault: BaseException) -> bool:
    """True for a fault that is a want of memory, of the host or of a device, as Python, the system or torch has it."""
    chain = list(causes(fault))
    if any(isinstance(one, MemoryError) or getattr(one, "errno", None) == errno.ENOMEM for one in chain):
        return True
    text = "\n".join(map(str, chain)).lower()
    return any(type(one).__name__ == "OutOfMemoryError" for one in chain) or (
        any(isinstance(one, RuntimeError) for one in chain) and any(words in text for words in _MEMORY)
    )
