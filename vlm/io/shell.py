"""Command lines that users can copy from a terminal."""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path


def shell_line(arguments: Iterable[str]) -> str:
    """Quotes arguments for a shell (bash, zsh), which restores them exactly, whatever characters they contain.

    Unprintable characters are written as the bytes of $'...', so that the result is one line without terminal commands.
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


def train_command(*arguments: str) -> str:
    """A quoted shell command: `python train.py` if that was called or exists here, else `vlm train`."""
    called = Path(sys.argv[0])
    script = called if called.name == "train.py" else Path("train.py")
    started = ["vlm", "train"] if called.stem == "vlm" or not script.is_file() else ["python", str(script)]
    return shell_line([*started, *arguments])
