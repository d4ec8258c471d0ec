"""Text for a terminal: folded to its width, and command lines to copy."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO
from unicodedata import category, east_asian_width

_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")  # between columns or scores
_OPTION = re.compile(r"(--[\w-]+) (?=[A-Z0-9])")  # an option, followed by its value
_COMMAND = re.compile(r"\((?:vlm|python) [^()]*\)")
PIPE_WIDTH = 80  # columns of sentences in a file or pipe
# Before a letter of a script without spaces: Thai, Lao, Burmese, Khmer, kana, Han. What is written above or below a
# letter, and punctuation after it, stays with it.
_LETTERS = (
    "\u0e01-\u0e30\u0e40-\u0e46\u0e81-\u0eb0\u0ec0-\u0ec4\u1000-\u102a\u1780-\u17b3"
    "\u3041-\u30ff\u3400-\u9fff\uf900-\ufaff"
)
_BREAK = re.compile(rf"(?<=[^\x00-\x7f])(?=[{_LETTERS}])")
NAME = 12  # width of the first column of lines such as "device      cpu"


def line_width(stream: TextIO) -> int | None:
    """Returns the number of columns of a line on a terminal; None for a file or pipe, whose lines have any length."""
    return shutil.get_terminal_size().columns - 1 if stream.isatty() else None


def folded(text: str, stream: TextIO | None = None, *, pipe_width: int | None = None) -> str:
    """Folds lines that are too long for the terminal.

    Lines break between columns first, then between words, or between characters of scripts without spaces. They never
    break inside an option, before its value, or inside a command in brackets, such as (vlm train model=pretrained).

    Args:
        stream: Target of the text; default stdout.
        pipe_width: Columns of a line for a file or pipe; by default its text is unchanged.
    """
    width = line_width(stream or sys.stdout) or pipe_width
    if width is None:
        return text
    return "\n".join(line if columns(line) <= width else _folded(line, width) for line in text.split("\n"))


def columns(text: str) -> int:
    """Returns the number of columns that a text takes on a terminal: Chinese characters take two, accents none."""
    if text.isascii():
        return len(text)
    widths = {"Mn": 0, "Me": 0, "Cf": 0}
    return sum(widths.get(category(char), 1 + (east_asian_width(char) in "WF")) for char in text)


def _folded(line: str, width: int) -> str:
    bare = line.lstrip()
    first = len(line) - len(bare)
    named = re.match(rf"(?=.{{{NAME}}}\S) *\S+ +", line)
    indent = " " * (NAME if named and named.end() == NAME else first + 4)
    parts = [line] if named and named.end() == NAME else _GAP.split(line)
    lines = parts[:1]
    for part in parts[1:]:
        joined = f"{lines[-1]}  {part}"
        if columns(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(indent + part)
    return "\n".join(_wrap(one, width, indent) for one in lines)


def _wrap(text: str, width: int, indent: str) -> str:
    """Breaks a line between words, and words between characters of scripts without spaces."""
    rows = [""]
    text = _COMMAND.sub(lambda command: command[0].replace(" ", "\xa0"), text)
    for gap, word in re.findall(r"( *)([^ ]+)", _OPTION.sub("\\1\xa0", text)):
        for piece in _BREAK.split(word):
            if columns(rows[-1] + gap + piece) > width and rows[-1].strip():
                rows.append(indent + piece)
            else:
                rows[-1] += gap + piece
            gap = ""
    return "\n".join(rows).replace("\xa0", " ")


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
