"""Splits text files into documents, lines, words and characters, also in scripts without spaces."""

import codecs
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vlm.data.records import report_error
from vlm.errors import UserError

if TYPE_CHECKING:
    import regex

BLOCK = 2**16  # bytes read at once; longer lines are split, because some corpora have no line breaks


def read_lines(path: Path) -> Iterator[str]:
    r"""Yields the lines of a UTF-8 file, with or without a byte order mark, unchanged.

    Only ``\n`` ends a line and is kept; very long lines are split.

    Raises:
        UserError: The file cannot be read, or a line of it is not UTF-8; inside `collect_errors`, invalid bytes are
            replaced instead.
    """
    decoder, number, rest = codecs.getincrementaldecoder("utf-8-sig")(), 1, ""
    for block in chain(_read_blocks(path), [b""]):
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = number + error.object.count(b"\n", 0, error.start)
            report_error(f"{path}, line {line}: is not UTF-8; save the file in UTF-8")
            decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
            text = decoder.decode(error.object, final=not block)
        *lines, rest = (rest + text).split("\n")
        yield from (f"{line}\n" for line in lines)
        number += len(lines)
        if len(rest) >= BLOCK:
            yield rest
            rest = ""
    yield from [rest] if rest else []


class Document(Protocol):
    """A text that is read line by line."""

    def lines(self) -> Iterator[str]:
        """Yields its lines, at least one, with line ends."""

    def size(self) -> int:
        """Approximate size in bytes; 0 if unknown."""


@dataclass(frozen=True)
class FileDocument:
    """A text file, or a part of it given by fractions of its characters."""

    path: Path
    name: str
    start: float = 0.0
    stop: float = 1.0

    def lines(self) -> Iterator[str]:
        """Yields the lines with line ends; the first and the last line of a part may be cut."""
        if (self.start, self.stop) == (0.0, 1.0):
            yield from read_lines(self.path)
            return
        count = _count_characters(self.path)
        first, last, at = int(count * self.start), int(count * self.stop), 0
        for line in read_lines(self.path):
            if part := line[max(0, first - at) : max(0, last - at)]:
                yield part
            at += len(line)

    def texts(self) -> Iterator[tuple[int, str]]:
        """Yields the number and the text of each line that begins in the part, without blank lines."""
        count = _count_characters(self.path) if (self.start, self.stop) != (0.0, 1.0) else 0
        first, last, at = int(count * self.start), int(count * self.stop), 0
        for number, line in enumerate(read_lines(self.path), 1):
            if (not count or first <= at < last) and (text := line.strip()):
                yield number, text
            at += len(line)

    def size(self) -> int:
        """Approximate size in bytes."""
        return int(self.path.stat().st_size * (self.stop - self.start))

    def stamp(self) -> str:
        """A string that changes when the file or the part changes."""
        file = self.path.stat()
        return f"{self.start} {self.stop} {file.st_size} {file.st_mtime_ns}"


def _count_characters(path: Path) -> int:
    """Number of characters of a file; invalid bytes are ignored here."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("ignore")
    return sum(len(decoder.decode(block)) for block in _read_blocks(path))


def _read_blocks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from iter(lambda: file.read(BLOCK), b"")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a readable file") from error


# Blocks of scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana, bopomofo, Han.
_SPACELESS = """
e00-e7f e80-eff 1000-109f 1780-17ff 19e0-19ff 3005-3007 3041-30ff 3100-312f 31a0-31bf 31f0-31ff 3400-4dbf 4e00-9fff
a9e0-a9ff aa60-aa7f f900-faff ff66-ff9f 1b000-1b16f 20000-323af
"""

_WORD = re.compile(r"\w+")


@cache
def spaceless_pattern() -> re.Pattern[str]:
    """Matches a character of a script without spaces and its combining marks, as a group."""
    spans = [span.split("-") for span in _SPACELESS.split()]
    ranges = "".join(f"{chr(int(low, 16))}-{chr(int(high, 16))}" for low, high in spans)
    small = (range(int(low, 16), int(high, 16) + 1) for low, high in spans if int(high, 16) < 0x3400)
    marks = [chr(code) for span in small for code in span if unicodedata.category(chr(code)) in ("Mn", "Mc")]
    return re.compile(f"([{ranges}][{''.join(marks)}\u3099\u309a\ufe00-\ufe0f]*)")


def words(text: str) -> Iterator[str]:
    """The words of a text without punctuation; each character of a script without spaces is a word."""
    for part in [text] if text.isascii() else spaceless_pattern().split(text):
        yield from [part] if spaceless_pattern().fullmatch(part) else _WORD.findall(part)


Span = tuple[int, int]


def merge_graphemes(spans: Iterable[Span], text: str) -> Iterator[Span]:
    """Joins adjacent spans of a text, given in order, that split a grapheme cluster."""
    import regex  # a command that splits no text starts without it

    starts = {match.start() for match in regex.finditer(r"\X", text)}
    begin = end = -1
    for start, stop in spans:
        if start != end or start in starts:
            if end > begin:
                yield begin, end
            begin = start
        end = stop
    if end > begin:
        yield begin, end


# In this order: URLs and addresses without trailing punctuation, @names and #topics, a word before n't, contractions,
# numbers with inner signs, abbreviations, words, runs of points or hyphens, other signs.
_PATTERN = r"""(?:https?://|www\.)\S*[^\s.,;:!?'"’”)\]>] | [\w.+-]+@[\w-]+(?:\.[\w-]+)+ | [@\#]\w+
    | \w+?(?=n['’]t\b) | n['’]t\b | ['’](?:s|re|ve|ll|d|m)\b
    | \d+(?:[.,:/-]\d+)* | (?:[^\W\d_]\.){2,} | \w+ | \.{2,} | -{2,} | \S"""
_ASCII = re.compile(_PATTERN, re.VERBOSE | re.IGNORECASE)


@cache
def _any_pattern() -> "regex.Pattern[str]":
    """The same for every script: combining marks stay with their letter, as in Hindi."""
    import regex

    # For the library, a fraction is no part of a word.
    pattern = _PATTERN.replace(r"[^\W\d_]", r"[\w\p{No}--[\d_]]").replace(r"\w+", r"[\w\p{No}]+")
    return regex.compile(pattern, regex.VERBOSE | regex.IGNORECASE | regex.VERSION1)


def split_words(text: str) -> list[str]:
    """The words of raw text.

    Punctuation marks, n't, 's, 're, 've, 'll, 'd and 'm are separate words; URLs, addresses, @names, #topics, numbers
    with signs and abbreviations with points are not split, nor is a grapheme cluster.
    """
    if text.isascii():
        return _ASCII.findall(text)
    return [
        text[start:stop]
        for start, stop in merge_graphemes((match.span() for match in _any_pattern().finditer(text)), text)
    ]


_BREAK = re.compile(r" *[^\S ]\s*")
_BREAK_BUT_NO_BREAK_SPACE = re.compile(r" *[^\S \u00a0\u202f][^\S\u00a0\u202f]*")


def to_single_line(text: str, *, keep_no_break: bool = False) -> str:
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
