"""Command lines that a user may copy from a terminal."""

import shlex
from collections.abc import Iterable


def shell_line(arguments: Iterable[str]) -> str:
    """Arguments as a line that a shell (bash, zsh) reads back as the very same, whatever characters they hold.

    What is not printable is written as $'...' with its bytes, so that the line is one and sends no commands to a
    terminal.
    """
    return " ".join(map(_quoted, arguments))


def _quoted(text: str) -> str:
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))
