"""Folds text to the width of a terminal."""

import re
import shutil
import sys
import textwrap
from typing import TextIO

_GAP = re.compile(r"(?<=\S) {2,}(?=\S)")  # between columns or scores
_OPTION = re.compile(r"(--[\w-]+) (?=[A-Z0-9])")  # an option, followed by its value
NAME = 12  # width of the first column of lines such as "device      cpu"


def folded(text: str, stream: TextIO | None = None) -> str:
    """Folds lines that are too long for the terminal; text for a file or pipe is unchanged.

    Lines break between columns first, then between words, never inside an option or before its value.

    Args:
        stream: Target of the text; default stdout.
    """
    if not (stream or sys.stdout).isatty():
        return text
    width = shutil.get_terminal_size().columns - 1
    return "\n".join(line if len(line) <= width else _folded(line, width) for line in text.split("\n"))


def _folded(line: str, width: int) -> str:
    bare = line.lstrip()
    first = len(line) - len(bare)
    named = re.match(rf"(?=.{{{NAME}}}\S)\S+ +", line)
    indent = " " * (NAME if named and named.end() == NAME else first + 4)
    parts = [line] if named and named.end() == NAME else _GAP.split(line)
    lines = parts[:1]
    for part in parts[1:]:
        joined = f"{lines[-1]}  {part}"
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(indent + part)
    wrapper = textwrap.TextWrapper(width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return "\n".join(wrapper.fill(_OPTION.sub("\\1\xa0", one)) for one in lines).replace("\xa0", " ")
