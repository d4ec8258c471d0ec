"""Tables in text files, read by the names of their columns: CSV, TSV, JSON lines, and lines without a header."""

import csv
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from vlm.data.records import SPLITS
from vlm.errors import UserError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")


class Cells(NamedTuple):
    """The cells of a row by the config's key of their column, and the row's place in its file."""

    values: dict[str, Any]
    where: str

    def split(self, path: Path) -> str | None:
        """The split that the row states; None where its table has no column of splits.

        Raises:
            UserError: It is none.
        """
        if "split_column" not in self.values:
            return None
        return parse_split(self.values["split_column"], path, self.where)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark.

    Raises:
        UserError: If the file cannot be read, or a line of it is not UTF-8.
    """
    try:
        return decode_text(path.read_bytes(), path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a file that can be read") from error


def decode_text(data: bytes, path: Path) -> str:
    """UTF-8 with or without a byte order mark.

    Raises:
        UserError: A line is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: is not UTF-8; save the file in UTF-8") from error


def parse_json(text: str) -> Any:
    r"""What a JSON text holds.

    Raises:
        ValueError: It is none, or has half of a surrogate pair (``\ud800``), which is no character.
        RecursionError: It is nested too deeply.
    """
    value = json.loads(text)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode_escape").decode()
            raise ValueError(f"{half} is half of a surrogate pair, no character") from error
    return value


def parse_split(value: str, path: Path, where: str) -> str:
    """One of ``train``, ``val``, ``test`` for any of the names they go by.

    Raises:
        UserError: If it is none of them.
    """
    split = SPLITS.get(value.strip().lower())
    if split is None:
        raise UserError(f"{path}, {where}: unknown split {value!r}; the known ones are {', '.join(SPLITS)}")
    return split


def read_cells(
    path: Path, columns: Mapping[str, str], *, names: Sequence[str] | None = None, delimiter: str | None = None
) -> Iterator[Cells]:
    """Rows of a CSV or TSV file with a header (RFC 4180), of a JSON-lines file, or of lines without a header.

    Args:
        columns: Key of the config -> name of the column. The one of ``split_column`` may be absent if it is ``split``.
        names: The columns of a file without a header, whose lines have no quotes; the last one holds the rest.
        delimiter: What parts them there.
    Raises:
        UserError: If the file's kind is unknown, a column is missing, or a line is malformed.
    """
    suffix = path.suffix.lower()
    if names is not None:
        yield from _line_rows(path, read_text(path), names, delimiter or "\t", columns)
    elif suffix in (".csv", ".tsv"):
        yield from _csv_rows(path, read_text(path), "\t" if suffix == ".tsv" else ",", columns)
    elif suffix in TABLES:
        yield from _json_rows(path, read_text(path), columns)
    else:
        raise UserError(f"{path}: not a kind of table that can be read; data.path takes {', '.join(TABLES)}")


def _check_columns(place: str, present: Collection[str], columns: Mapping[str, str]) -> dict[str, str]:
    """The columns that are there."""
    for key, column in columns.items():
        if column not in present and (key, column) != ("split_column", "split"):
            shown = ", ".join(map(repr, present)) or "none"
            raise UserError(f"{place}: no column {column!r} among {shown}; set data.source.{key} to the right one")
    return {key: column for key, column in columns.items() if column in present}


def _line_rows(
    path: Path, text: str, names: Sequence[str], delimiter: str, columns: Mapping[str, str]
) -> Iterator[Cells]:
    known = _check_columns(str(path), names, columns)
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if not line:
            continue
        cells = line.split(delimiter, len(names) - 1)
        if len(cells) < len(names):
            raise UserError(
                f"{path}, line {number}: {len(cells)} cells where {', '.join(names)} are {len(names)}; mend it, or set "
                "data.source.columns and data.source.delimiter"
            )
        row = dict(zip(names, cells, strict=True))
        yield Cells({key: row[column] for key, column in known.items()}, f"line {number}")


def _csv_rows(path: Path, text: str, delimiter: str, columns: Mapping[str, str]) -> Iterator[Cells]:
    csv.field_size_limit(2**31 - 1)  # a caption may be longer than Python's 131,072 characters
    # Strict, because else a stray quote silently swallows the rows that follow it.
    reader = csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        known = {key: header.index(column) for key, column in _check_columns(str(path), header, columns).items()}
        for row in reader:
            if not row:
                continue
            where = f"line {reader.line_num}"
            if len(row) > len(header) and any(row[len(header) :]):
                raise UserError(
                    f"{path}, {where}: {len(row)} fields under {len(header)} columns; "
                    'put quotes (") around cells that hold the delimiter'
                )
            row += [""] * (len(header) - len(row))
            yield Cells({key: row[place] for key, place in known.items()}, where)
    except csv.Error as error:
        raise UserError(
            f'{path}, line {reader.line_num}: {error}; put quotes (") around such a cell and double those inside'
        ) from error


def _json_rows(path: Path, text: str, columns: Mapping[str, str]) -> Iterator[Cells]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            record = parse_json(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, {where}: not JSON ({error}); give one object a line") from error
        if not isinstance(record, dict):
            raise UserError(f"{path}, {where}: not a JSON object; give one object a line")
        known = _check_columns(f"{path}, {where}", record, columns)
        yield Cells({key: record[column] for key, column in known.items()}, where)
