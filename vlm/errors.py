"""Faults as lines of text: the one exception that reaches a user without a traceback, and its printing."""

import sys


class UserError(Exception):
    """Something a user can put right.

    The message is one or two lines: it names the file or key, says what is wrong with it, and gives the remedy. What it
    quotes of files and their names sends no commands to a terminal.

    Args:
        message: What is printed after ``error: ``.
        status: Exit status of the process: 2 for wrong usage, config or checkpoint; 1 for a fault of input or machine.
    """

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))
        self.status = status


class SharedError(UserError):
    """What all ranks of a run find together, each with the same message: the first one tells of it."""


def printable(text: str) -> str:
    """Text that stays on one line and sends no commands to a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def print_error(message: object, kind: str = "error") -> None:
    """Prints a fault on stderr; further lines are indented, so that no name that holds a newline forges a second one.

    Args:
        kind: "error" or "warning".
    """
    print(f"{kind}:", "\n  ".join(map(printable, str(message).split("\n"))), file=sys.stderr, flush=True)
