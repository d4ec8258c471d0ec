"""Texts of one line: captions, references, a text and its translation."""

import re

_BREAK = re.compile(r" *[^\S ]\s*")
_BREAK_BUT_NO_BREAK_SPACE = re.compile(r" *[^\S \u00a0\u202f][^\S\u00a0\u202f]*")


def one_line(text: str, *, keep_no_break: bool = False) -> str:
    """A text without white space at its ends, and with one space for each line break, tab or other white space.

    Runs of plain spaces stay: a tokenizer knows them, and metrics do not see them.

    Args:
        keep_no_break: Whether no-break spaces stay, as where French is translated.
    """
    pattern, ends = (_BREAK_BUT_NO_BREAK_SPACE, " \t\r\n") if keep_no_break else (_BREAK, None)
    return (text if text.isascii() and text.isprintable() else pattern.sub(" ", text)).strip(ends)
