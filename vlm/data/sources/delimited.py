"""Delimited text: CSV and TSV files with quoted cells (RFC 4180) or without quoting, and lines without a header."""

import csv
import re
from collections.abc import Callable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Literal, NamedTuple

from vlm.data.records import RowError
from vlm.errors import UserError, excerpt

Quoting = Literal["auto", "none", "standard"]
RejectRow = Callable[[str, str | RowError], None]  # takes the position of an invalid row, and the reason
DELIMITERS = {".csv": ",;\t|", ".tsv": "\t", ".txt": "\t,;|"}  # possible delimiters by suffix, the usual one first
_QUOTED_CELL = re.compile(r'"(?:[^"]|"")*"')
_LINE_END = re.compile(r"\r\n?|\n")
_SEPARATOR_LINE = re.compile(r'"?sep=([,;|\t])"?(?=\r|\n)', re.IGNORECASE)  # of Excel, before the header


class TextRow(NamedTuple):
    """The cells of a row, and the number of its last line in the file."""

    line: int
    cells: list[str]


def find_delimiter(text: str, delimiters: str, count_columns: Callable[[Sequence[str]], int]) -> tuple[str, str]:
    """Returns the delimiter of a table, and its text with an empty line in place of a first line such as `sep=;`.

    The delimiter is the one in that line, or else the one that finds most of the columns in the header; on a tie, the
    first of `delimiters`.

    Args:
        count_columns: Returns the number of columns of the config among the names in a header.
    """
    if match := _SEPARATOR_LINE.match(text):
        return match[1], text[match.end() :]

    def count(delimiter: str) -> int:
        try:
            header = next(csv.reader(StringIO(text.lstrip("\r\n"), newline=""), delimiter=delimiter, strict=True), [])
        except csv.Error:  # a quoted cell ends before another delimiter
            return 0
        return count_columns(header)

    return max(delimiters, key=count), text


def read_rows(path: Path, text: str, delimiter: str, quoting: Quoting, notes: list[str]) -> Iterator[TextRow]:
    """Rows of delimited text, the header first; empty lines are skipped.

    With ``auto``, a file with tabs is read without quoting if every line then has as many cells as the header and a
    cell begins with a quotation mark without being a complete quoted cell. Other files have quoted cells.

    Args:
        notes: Extended by the choice, if it changes cells, and by rows that a stray quotation mark may have joined.
    Raises:
        UserError: A quoted cell is malformed.
    """
    if quoting == "auto" and delimiter == "\t":
        quoting, reason = _choose_quoting(text)
        if reason:
            notes.append(f"{path}: {reason}")
    if quoting == "none":
        return _split_lines(text, delimiter)
    return _quoted_rows(path, text, delimiter, notes)


def _choose_quoting(text: str) -> tuple[Quoting, str]:
    """The quoting of a file with tabs, and the reason; no reason if both ways give the same cells."""
    if '"' not in text:
        return "standard", ""
    width = lines = stray = 0
    ragged, begins_quoted = "", False
    for line, cells in _split_lines(text, "\t"):
        width, lines = width or len(cells), lines + 1
        if len(cells) != width and not ragged:
            ragged = f", because line {line} has {len(cells)} cells where the header has {width}"
        for cell in cells:
            if cell.startswith('"'):
                begins_quoted = True
                stray = stray or (0 if _QUOTED_CELL.fullmatch(cell) else line)
    if stray and not ragged:
        return "none", (
            f"read without quoting, because all {lines:,} lines have {width} cells, and a quotation mark in line "
            f"{stray} begins no complete quoted cell; data.source.quoting=standard reads quoted cells"
        )
    if not begins_quoted:
        return "standard", ""
    return "standard", f"read with quoted cells{ragged}; data.source.quoting=none keeps quotation marks as text"


def _split_lines(text: str, delimiter: str) -> Iterator[TextRow]:
    """Rows of text without quoting: only a line feed ends a line."""
    for number, line in enumerate(text.split("\n"), 1):
        if line := line.removesuffix("\r"):
            yield TextRow(number, line.split(delimiter))


def _quoted_rows(path: Path, text: str, delimiter: str, notes: list[str]) -> Iterator[TextRow]:
    """Rows of text with quoted cells."""
    csv.field_size_limit(2**31 - 1)  # captions may be longer than Python's default of 131,072 characters
    # Strict, because otherwise a stray quote silently swallows the following rows. Lines end as the first one does: a
    # carriage return inside a line of a file with line feeds is an error, and not the end of a row.
    end = _LINE_END.search(text)
    lines = StringIO(text, newline="" if end and end[0] == "\r" else "\n")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    width, joined, first, before = 0, 0, "", 0
    try:
        for cells in reader:
            width = width or len(cells)
            if reader.line_num - before > 1 and (cell := _find_joined_rows(cells, delimiter, width)):
                joined += 1
                first = first or f"lines {before + 1} to {reader.line_num}: {excerpt(cell)!r}"
            before = reader.line_num
            if cells:
                yield TextRow(reader.line_num, cells)
    except csv.Error as error:
        reason = "a carriage return in a cell without quotes" if "new-line character" in str(error) else error
        where = reader.line_num
        if where - before > 1:
            reason = f"the quoted cell that begins here does not end properly (line {where}: {reason})"
            where = _find_open_quote(text, before, where, delimiter)
        raise UserError(
            f'{path}, line {where}: {reason}; quote (") the cell and double the quotes inside, or set '
            "data.source.quoting=none if quotation marks are text"
        ) from error
    if joined:
        notes.append(
            f"{path}: {joined:,} quoted cell{'s' * (joined > 1)} may be several rows joined by stray quotation marks "
            f"({first}); if so, set data.source.quoting=none"
        )


def _find_open_quote(text: str, first: int, last: int, delimiter: str) -> int:
    """Number of the line, of those after `first` and up to `last`, in which the last quoted cell begins."""
    lines = text.split("\n")[first:last]
    is_open, begin = False, first + 1
    for number, line in enumerate(lines, first + 1):
        start_of_cell, place = True, 0
        while place < len(line):
            char = line[place]
            if is_open and line.startswith('""', place):
                place += 1
            elif is_open and char == '"':
                is_open = False
            elif not is_open and char == '"' and start_of_cell:
                is_open, begin = True, number
            start_of_cell = not is_open and char == delimiter
            place += 1
    return begin


def _find_joined_rows(cells: Sequence[str], delimiter: str, width: int) -> str:
    """The cell that would be complete rows without its quotation marks: its first and last line complete the row."""
    for place, cell in enumerate(cells):
        first, _, last = *cell.partition("\n")[:2], cell.rpartition("\n")[2]
        before, after = place + 1 + first.count(delimiter), len(cells) - place + last.count(delimiter)
        if width > 1 and "\n" in cell and before == width == after:
            return cell
    return ""


def headerless_rows(
    path: Path,
    text: str,
    names: Sequence[str],
    delimiter: str,
    quoting: Quoting,
    notes: list[str],
    reject: RejectRow,
) -> Iterator[TextRow]:
    """Rows of lines without a header, whose last column takes the rest of the line unless cells are quoted.

    Args:
        notes: Extended by the first line with a quoted cell, if quotation marks are text.
        reject: Called for a row with another number of cells.
    Raises:
        UserError: A quoted cell is malformed.
    """
    quoted = None
    rows = _quoted_rows(path, text, delimiter, notes) if quoting == "standard" else _split_lines(text, "\n")
    for line, cells in rows:
        if quoting != "standard":
            cells = cells[0].split(delimiter, len(names) - 1)
            if quoted is None and any(len(cell) > 1 and _QUOTED_CELL.fullmatch(cell) for cell in cells):
                quoted = line
        if len(cells) != len(names):
            reject(
                f"line {line}",
                f"{len(cells)} cells instead of the {len(names)} columns {', '.join(names)}; "
                "correct it, or set data.source.columns and data.source.delimiter",
            )
            continue
        yield TextRow(line, cells)
    if quoted is not None and quoting == "auto":
        notes.append(
            f"{path}: line {quoted} has a cell in quotation marks, which are kept, because lines without a header have "
            "no quoting; data.source.quoting=standard reads quoted cells"
        )
