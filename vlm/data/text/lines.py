"""Lines of text files, and texts of one line: captions, references, a text and its translation."""

import re

_BREAK = re.compile(r" *[^\S ]\s*")
_BREAK_BUT_NO_BREAK_SPACE = re.compile(r" *[^\S \u00a0\u202f][^\S\u00a0\u202f]*")


def one_line(text: str, *, keep_no_break: bool = False) -> str:
    """Converts a text to one line: strips it, and replaces line breaks, tabs and other white space by single spaces.

    Runs of plain spaces are kept: a tokenizer has pieces for them, and metrics ignore them.

    Args:
        keep_no_break: Whether to keep no-break spaces, for example for translations of French.
    """
    pattern, ends = (_BREAK_BUT_NO_BREAK_SPACE, " \t\r\n") if keep_no_break else (_BREAK, None)
    return (text if text.isascii() and text.isprintable() else pattern.sub(" ", text)).strip(ends)


def split_lines(text: str) -> list[str]:
    r"""Splits the content of a text file into its lines. Only ``\n`` or ``\r\n`` ends a line, as in other tools.

    Python's own ways also split at a lone carriage return (files in text mode), form feeds and U+2028 (`splitlines`).
    """
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
