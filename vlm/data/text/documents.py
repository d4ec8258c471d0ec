"""Text files as documents, read line by line, so that their size does not matter."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vlm.errors import UserError

BLOCK = 2**16  # bytes read at once; longer lines are split, because some corpora have no line breaks


def read_lines(path: Path) -> Iterator[str]:
    r"""Yields the lines of a UTF-8 file, with or without a byte order mark, unchanged.

    Only ``\n`` ends a line and is kept; very long lines are split.

    Raises:
        UserError: The file cannot be read, or a line of it is not UTF-8.
    """
    decoder, number, rest = codecs.getincrementaldecoder("utf-8-sig")(), 1, ""
    try:
        for block in _blocks(path):
            *lines, rest = (rest + decoder.decode(block)).split("\n")
            yield from (f"{line}\n" for line in lines)
            number += len(lines)
            if len(rest) >= BLOCK:
                yield rest
                rest = ""
        decoder.decode(b"", final=True)
        yield from [rest] if rest else []
    except UnicodeDecodeError as error:
        number += error.object.count(b"\n", 0, error.start)
        raise UserError(f"{path}, line {number}: is not UTF-8; save the file in UTF-8") from error


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
        count = _characters(self.path)
        first, last, at = int(count * self.start), int(count * self.stop), 0
        for line in read_lines(self.path):
            if kept := line[max(0, first - at) : max(0, last - at)]:
                yield kept
            at += len(line)

    def texts(self) -> Iterator[tuple[int, str]]:
        """Yields the number and the text of each line that begins in the part, without blank lines."""
        count = _characters(self.path) if (self.start, self.stop) != (0.0, 1.0) else 0
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


def _characters(path: Path) -> int:
    """Number of characters of a file; invalid bytes are ignored here."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("ignore")
    return sum(len(decoder.decode(block)) for block in _blocks(path))


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from iter(lambda: file.read(BLOCK), b"")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a readable file") from error
