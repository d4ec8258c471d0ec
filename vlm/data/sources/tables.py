"""Tables, read by the names of their columns: CSV, TSV, JSON lines, lines without a header, Parquet and Arrow."""

import csv
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from vlm.data.records import SPLITS
from vlm.data.store import columns as stored
from vlm.errors import UserError

PARTED = {".csv": ",;\t|", ".tsv": "\t", ".txt": "\t,;|"}  # what may part the cells, the usual one first
LINES = (".jsonl", ".ndjson")
TABLES = (*PARTED, *LINES, ".json", *stored.SUFFIXES)
SYNONYMS = {"image": "file_name", "caption": "text"}  # in Hugging Face's metadata.jsonl
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Cells(NamedTuple):
    """The cells of a row by the config's key of their column, and the row's place in its file."""

    values: dict[str, Any]
    where: str

    def split(self, path: Path) -> str | None:
        """The split that the row states; None where its table has no column of splits, or JSON's null there.

        Raises:
            UserError: It is none.
        """
        split = self.values.get("split_column")
        return None if split is None else parse_split(str(split), path, self.where)


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
    r"""The value that a JSON text holds.

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
    """Rows of a CSV, TSV or TXT file with a header (RFC 4180), of JSON lines or an array, or of lines without a header.

    A Parquet or Arrow file, or a folder of some, is a table too; an image in it is named FILE/ROW. Columns are found
    whatever their case, ``image`` and ``caption`` also as ``file_name`` and ``text``. What parts the cells is known by
    the header: of the usual delimiters, the one that shows most of the columns.

    Args:
        columns: Key of the config -> name of the column. The one of ``split_column`` may be absent if it is ``split``.
        names: The columns of a file without a header, whose lines have no quotes; the last one holds the rest.
        delimiter: What parts them there.
    Raises:
        UserError: If the file's kind is unknown, columns are missing (all of them are named), or a line is malformed.
    """
    suffix = path.suffix.lower()
    if stored.is_columns(path):
        yield from _stored_rows(path, columns)
    elif names is not None:
        yield from _line_rows(path, read_text(path), names, delimiter or "\t", columns)
    elif suffix in PARTED:
        yield from _csv_rows(path, read_text(path), PARTED[suffix], columns)
    elif suffix in LINES:
        yield from _json_rows(path, _json_lines(path, read_text(path)), columns)
    elif suffix in TABLES:
        yield from _json_rows(path, _json_array(path, read_text(path)), columns)
    else:
        raise UserError(f"{path}: not a kind of table that can be read; data.path takes {', '.join(TABLES)}")


def find_column(name: str, present: Collection[str]) -> str | None:
    """The column of this name, or of its synonym; its letters may be of another case in one column alone."""
    for wanted in filter(None, (name, SYNONYMS.get(name))):
        if wanted in present:
            return wanted
        alike = [column for column in present if column.strip().lower() == wanted.lower()]
        if len(alike) == 1:
            return alike[0]
    return None


def _find_columns(place: str, present: Collection[str], columns: Mapping[str, str]) -> dict[str, str]:
    """Key of the config -> the column that is there.

    Raises:
        UserError: Some are not; it names them all.
    """
    known = {key: find_column(name, present) for key, name in columns.items()}
    missing = [
        key for key, column in known.items() if column is None and (key, columns[key]) != ("split_column", "split")
    ]
    if missing:
        lacking = " and ".join(repr(columns[key]) for key in missing)
        if not present:
            raise UserError(f"{place}: is empty; a table has the columns {lacking}")
        keys = " and ".join(f"data.source.{key}" for key in missing)
        shown = ", ".join(map(repr, present))
        many = "s" if len(missing) > 1 else ""
        raise UserError(f"{place}: no column{many} {lacking} among {shown}; set {keys} to the right one{many}")
    return {key: column for key, column in known.items() if column is not None}


def _stored_rows(path: Path, columns: Mapping[str, str]) -> Iterator[Cells]:
    """Rows of tables stored by columns; a split that no column states is that of the file."""
    for file, split in stored.column_files(path):
        table = stored.open_columns(file)
        known = _find_columns(str(file), table.names, columns)
        inside = {key for key, name in known.items() if key == "image_column" and table.is_image(name)}
        place = "" if file == path else f"{file.relative_to(path)} "
        for number, row in enumerate(table.rows([name for key, name in known.items() if key not in inside])):
            values = {key: f"{file}/{number}" if key in inside else row[name] for key, name in known.items()}
            values |= {key: "" for key, value in values.items() if value is None and key != "split_column"}
            if split is not None and "split_column" in columns:
                values.setdefault("split_column", split)
            yield Cells(values, f"{place}row {number}")


def _line_rows(
    path: Path, text: str, names: Sequence[str], delimiter: str, columns: Mapping[str, str]
) -> Iterator[Cells]:
    known = _find_columns(str(path), names, columns)
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


def _delimiter(text: str, delimiters: str, names: Collection[str]) -> str:
    """The delimiter under which the header has most of the columns, the first of equals."""

    def count(delimiter: str) -> int:
        try:
            header = next(csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True), [])
        except csv.Error:  # quotes end before another delimiter
            return 0
        return sum(find_column(name, header) is not None for name in names)

    return max(delimiters, key=count)


def _csv_rows(path: Path, text: str, delimiters: str, columns: Mapping[str, str]) -> Iterator[Cells]:
    csv.field_size_limit(2**31 - 1)  # a caption may be longer than Python's 131,072 characters
    # Strict, because else a stray quote silently swallows the rows that follow it.
    delimiter = _delimiter(text.lstrip("\r\n"), delimiters, columns.values())
    reader = csv.reader(StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        header = [name.strip() for name in next(filter(None, reader), [])]
        named = _find_columns(str(path), header, columns)
        for column in (column for column in named.values() if header.count(column) > 1):
            raise UserError(f"{path}: has {header.count(column)} columns {column!r}; rename or remove all but one")
        known = {key: header.index(column) for key, column in named.items()}
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


def _json_lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"line {number}", parse_json(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not JSON ({error}); give one object a line") from error


def _json_array(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    try:
        array = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not JSON ({error}); give an array of objects, or one object a line as .jsonl"
        ) from error
    if not isinstance(array, list):
        raise UserError(f"{path}: not an array of objects; give one (data=coco reads COCO's annotations)")
    yield from ((f"object {number}", record) for number, record in enumerate(array, 1))


def _json_rows(path: Path, records: Iterable[tuple[str, Any]], columns: Mapping[str, str]) -> Iterator[Cells]:
    for where, record in records:
        if not isinstance(record, dict):
            raise UserError(f"{path}, {where}: not a JSON object; give each row as one")
        known = _find_columns(f"{path}, {where}", record, columns)
        yield Cells({key: record[column] for key, column in known.items()}, where)
