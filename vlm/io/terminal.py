"""Text for a terminal: lines folded to its width, and shell commands to copy."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO
from unicodedata import category, east_asian_width

_COLUMN_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")  # between columns or scores
_OPTION_WITH_VALUE = re.compile(r"(--[\w-]+) (?=[A-Z0-9])")  # an option, followed by its value
_COMMAND = re.compile(r"\((?:vlm|python) [^()]*\)")
PIPE_WIDTH = 80  # line width of sentences in a file or pipe
# Letters of scripts without spaces, before which a line may break: Thai, Lao, Burmese, Khmer, kana, Han. Combining
# marks and punctuation stay with the preceding letter.
_LETTERS = (
    "\u0e01-\u0e30\u0e40-\u0e46\u0e81-\u0eb0\u0ec0-\u0ec4\u1000-\u102a\u1780-\u17b3"
    "\u3041-\u30ff\u3400-\u9fff\uf900-\ufaff"
)
_BREAK = re.compile(rf"(?<=[^\x00-\x7f])(?=[{_LETTERS}])")
LABEL_WIDTH = 12  # width of the first column of lines such as "device      cpu"


def line_width(stream: TextIO) -> int | None:
    """Returns the number of columns of a terminal; None for a file or pipe, whose lines are not folded."""
    return shutil.get_terminal_size().columns - 1 if stream.isatty() else None


def fold(text: str, stream: TextIO | None = None, *, pipe_width: int | None = None) -> str:
    """Folds lines that are too long for the terminal.

    Lines break between columns first, then between words, or between characters of scripts without spaces. They never
    break inside an option, before its value, or inside a command in brackets, such as (vlm train model=pretrained).

    Args:
        stream: The stream that the text is written to; default stdout.
        pipe_width: Line width for a file or pipe; by default, its text is not folded.
    """
    width = line_width(stream or sys.stdout) or pipe_width
    if width is None:
        return text
    return "\n".join(line if columns(line) <= width else _fold_line(line, width) for line in text.split("\n"))


def columns(text: str) -> int:
    """Returns the width of a text on a terminal: two columns for wide characters, none for combining marks."""
    if text.isascii():
        return len(text)
    widths = {"Mn": 0, "Me": 0, "Cf": 0}
    return sum(widths.get(category(char), 1 + (east_asian_width(char) in "WF")) for char in text)


def _fold_line(line: str, width: int) -> str:
    label = re.match(rf"(?=.{{{LABEL_WIDTH}}}\S) *\S+ +", line)
    has_label = label is not None and label.end() == LABEL_WIDTH
    indent = " " * (LABEL_WIDTH if has_label else len(line) - len(line.lstrip()) + 4)
    parts = [line] if has_label else _COLUMN_GAP.split(line)
    lines = parts[:1]
    for part in parts[1:]:
        joined = f"{lines[-1]}  {part}"
        if columns(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(indent + part)
    return "\n".join(_wrap_words(line, width, indent) for line in lines)


def _wrap_words(text: str, width: int, indent: str) -> str:
    """Breaks a line between words, or between characters of scripts without spaces."""
    rows = [""]
    text = _COMMAND.sub(lambda command: command[0].replace(" ", "\xa0"), text)
    for gap, word in re.findall(r"( *)([^ ]+)", _OPTION_WITH_VALUE.sub("\\1\xa0", text)):
        for piece in _BREAK.split(word):
            if columns(rows[-1] + gap + piece) > width and rows[-1].strip():
                rows.append(indent + piece)
            else:
                rows[-1] += gap + piece
            gap = ""
    return "\n".join(rows).replace("\xa0", " ")


def shell_line(arguments: Iterable[str]) -> str:
    """Joins arguments to a command line for bash or zsh. Like `shlex.join`, but always a single printable line.

    Unprintable characters are written as bytes in $'...', so that a terminal executes none of them.
    """
    return " ".join(
        shlex.quote(text) if text.isprintable() else f"$'{''.join(map(_escape_char, text))}'" for text in arguments
    )


def _escape_char(char: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def train_command(*arguments: str) -> str:
    """Returns a quoted shell command: `python train.py` if it was called or exists here, else `vlm train`."""
    program = Path(sys.argv[0])
    script = program if program.name == "train.py" else Path("train.py")
    command = ["vlm", "train"] if program.stem == "vlm" or not script.is_file() else ["python", str(script)]
    return shell_line([*command, *arguments])
