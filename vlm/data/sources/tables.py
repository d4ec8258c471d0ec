"""Readers of tables by column name: CSV, TSV, JSON lines, lines without a header, Parquet and Arrow."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

from vlm.data.records import SPLITS, RowChecker, RowError, S, report_error
from vlm.data.sources.delimited import (
    DELIMITERS,
    Quoting,
    RejectRow,
    TextRow,
    find_delimiter,
    headerless_rows,
    read_rows,
)
from vlm.data.store import columns as stored
from vlm.errors import UserError, find_similar
from vlm.untrusted.sizes import JsonValue

LINES = (".jsonl", ".ndjson")
TABLES = (*DELIMITERS, *LINES, ".json", *stored.SUFFIXES)
SYNONYMS = {"image": "file_name", "caption": "text"}  # in Hugging Face's metadata.jsonl
_VALUE = re.compile(r"\.[A-Za-z]{2,5}$|\S+(?:\s+\S+){3}")  # a file name or a sentence, so not a column name
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class Cells(NamedTuple):
    """The cells of a row, keyed by the config's key of their column, and the row's position in the file."""

    values: dict[str, Any]
    position: str

    @property
    def split(self) -> str | None:
        """The split of the row; None if the table has no such column or the value is null.

        Raises:
            RowError: The value is not a split.
        """
        split = self.values.get("split_column")
        return None if split is None else parse_split(str(split))


class ReadOptions(TypedDict, total=False):
    """Optional arguments of `read_cells`, which documents them."""

    names: Sequence[str] | None
    delimiter: str | None
    optional: Collection[str]
    quoting: Quoting


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark.

    Raises:
        UserError: The file cannot be read, or is not UTF-8.
    """
    try:
        return decode_text(path.read_bytes(), path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a readable file") from error


def decode_text(data: bytes, path: Path) -> str:
    """Decodes UTF-8 with or without a byte order mark.

    Raises:
        UserError: A line is not UTF-8. Inside `collect_errors`, its invalid bytes are replaced instead.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        report_error(f"{path}, line {line}: is not UTF-8; save the file in UTF-8")
        return data.decode("utf-8-sig", "replace")


def parse_json(text: str) -> JsonValue:
    r"""Parses a JSON text.

    Raises:
        ValueError: It is invalid, an object has a key twice, or a text has half of a surrogate pair (``\ud800``), which
            is not a character.
        RecursionError: It is nested too deeply.
    """
    value = json.loads(text, object_pairs_hook=_unique_keys)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode_escape").decode()
            raise ValueError(f"{half} is half of a surrogate pair, not a character") from error
    return value


def _unique_keys(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    """Makes the dict of a JSON object; readers disagree on which value of a repeated key counts."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {next(key for key in keys if keys.count(key) > 1)!r} more than once")
    return values


def read_json(path: Path, fault: str, remedy: str) -> JsonValue:
    """The content of a JSON file.

    Args:
        fault: What the file is not, such as "not JSON".
        remedy: What to do.
    Raises:
        UserError: The file cannot be read, or is invalid (see `parse_json`).
    """
    try:
        return parse_json(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: {fault} ({error}); {remedy}") from error


def parse_split(value: str) -> str:
    """Converts a name of a split, or a synonym, to ``train``, ``val`` or ``test``.

    Raises:
        RowError: The name is unknown.
    """
    split = SPLITS.get(value.strip().lower())
    if split is None:
        raise RowError(f"unknown split {value!r}; choose from {', '.join(SPLITS)}")
    return split


def read_table(
    checker: RowChecker,
    columns: Mapping[str, str],
    convert: Callable[[Cells], Iterable[S]],
    **options: Unpack[ReadOptions],
) -> Iterator[S]:
    """Yields what `convert` returns for each row of the checker's table; invalid rows are skipped up to a limit.

    Args:
        checker: Counts the rows of the table.
        columns: See `read_cells`.
        convert: Converts a row; raises RowError if it is invalid.
        options: See `read_cells`.
    Raises:
        UserError: As in `read_cells`; or too many rows are invalid.
    """
    notes: list[str] = []
    cells = read_cells(checker.path, columns, reject=checker.reject, notes=notes, **options)
    yield from checker.read(((row.position, row) for row in cells), convert)
    checker.source.notes = [*checker.source.notes, *notes]


def read_cells(
    path: Path,
    columns: Mapping[str, str],
    *,
    names: Sequence[str] | None = None,
    delimiter: str | None = None,
    optional: Collection[str] = (),
    quoting: Quoting = "auto",
    notes: list[str],
    reject: RejectRow | None = None,
) -> Iterator[Cells]:
    """Rows of a CSV, TSV or TXT file with a header (RFC 4180), of JSON lines or an array, or of lines without a header.

    Parquet or Arrow files, and folders of them, are tables too; images in them are named FILE/ROW. Column names are
    case-insensitive; ``image`` and ``caption`` may also be ``file_name`` and ``text``. The delimiter is the one that
    finds most of the columns in the header.

    Args:
        columns: Column name by key of the config, or several separated by ``|``, of which the first existing one is
            read. The column of ``split_column`` is optional if it is called ``split``.
        names: Columns of a file without a header; the last one takes the rest of the line.
        delimiter: Delimiter of such a file.
        optional: Keys of columns that a table, or a row of JSON, may lack.
        quoting: Whether CSV and TSV files have quoted cells; see `delimited.read_rows`.
        notes: Extended by messages about how the file is read, for the user.
        reject: Called with the position of an invalid row and the reason, to skip it; None raises UserError.
    Raises:
        UserError: The file type is unknown, columns are missing (all are named), or a row is invalid.
    """
    suffix = path.suffix.lower()

    def refuse_row(where: str, reason: str | RowError) -> None:
        raise UserError(f"{path}, {where}: {reason}")

    reject = reject or refuse_row
    if stored.is_columnar(path):
        yield from _stored_rows(path, columns, optional)
    elif names is not None:
        named = _find_columns(str(path), names, columns, optional)
        positions = {key: list(names).index(column) for key, column in named.items()}
        for line, row in headerless_rows(path, read_text(path), names, delimiter or "\t", quoting, notes, reject):
            yield Cells({key: row[position] for key, position in positions.items()}, f"line {line}")
    elif suffix in DELIMITERS:
        delimiter, text = find_delimiter(
            read_text(path),
            DELIMITERS[suffix],
            lambda header: sum(find_column(name, header) is not None for name in columns.values()),
        )
        rows = read_rows(path, text, delimiter, quoting, notes)
        yield from _delimited_rows(path, rows, columns, optional, notes, reject)
    elif suffix in LINES:
        yield from _json_rows(path, _json_lines(read_text(path), reject), columns, optional, reject)
    elif suffix in TABLES:
        remedy = "give an array of objects, or a .jsonl file with one object per line"
        if not isinstance(array := read_json(path, "not JSON", remedy), list):
            raise UserError(f"{path}: not an array of objects; give one (COCO annotations need data=coco)")
        numbered = ((f"object {number}", record) for number, record in enumerate(array, 1))
        yield from _json_rows(path, numbered, columns, optional, reject)
    else:
        raise UserError(f"{path}: unsupported file type; data.path supports {', '.join(TABLES)}")


def find_column(name: str, present: Collection[str]) -> str | None:
    """The column with this name or its synonym; case is ignored if the match is unique."""
    for wanted in filter(None, (*name.split("|"), SYNONYMS.get(name))):
        if wanted in present:
            return wanted
        alike = [column for column in present if column.strip().lower() == wanted.lower()]
        if len(alike) == 1:
            return alike[0]
    return None


def _find_columns(
    place: str,
    present: Collection[str],
    columns: Mapping[str, str],
    optional: Collection[str] = (),
    *,
    may_replace: bool = True,
) -> dict[str, str]:
    """Finds the columns; returns their names by key of the config.

    Inside `collect_errors`, missing columns are replaced by those that the message suggests.

    Args:
        may_replace: Whether other columns can be read in place of missing ones.
    Raises:
        UserError: Columns are missing; it names all of them.
    """
    try:
        return _match_columns(present, columns, optional)
    except RowError as error:
        suggested = _suggest_columns(present, columns, optional) if may_replace and "no column" in str(error) else {}
        if not suggested:
            raise UserError(f"{place}: {error}") from error
        report_error(f"{place}: {error}, such as {' and '.join(map(repr, suggested.values()))}")
        return _match_columns(present, {**columns, **suggested}, optional)


def _suggest_columns(present: Collection[str], columns: Mapping[str, str], optional: Collection[str]) -> dict[str, str]:
    """The column that each missing one probably is, by key; empty if one has no unused column of a similar name.

    A single unused column stands for a single missing one.
    """
    matched = {key: find_column(name, present) for key, name in columns.items()}
    unused = [name for name in present if name not in matched.values()]
    missing = [
        key for key, column in matched.items() if column is None and key not in optional and columns[key] != "split"
    ]
    suggested: dict[str, str] = {}
    for key in missing:
        usual = key.removesuffix("_column")
        single = unused[0] if len(unused) == len(missing) == 1 else None
        similar = find_similar(columns[key], unused) or find_similar(usual, unused)
        if not (column := find_column(usual, unused) or similar or single):
            return {}
        suggested[key] = column
        unused.remove(column)
    return suggested


def _match_columns(
    present: Collection[str], columns: Mapping[str, str], optional: Collection[str] = ()
) -> dict[str, str]:
    """As `_find_columns`, for one row; raises RowError."""
    matched = {key: find_column(name, present) for key, name in columns.items()}
    optional_keys = {*optional, *(["split_column"] if columns.get("split_column") == "split" else [])}
    missing = [key for key, column in matched.items() if column is None and key not in optional_keys]
    if missing:
        lacking = " and ".join(repr(columns[key]) for key in missing)
        if not present:
            raise RowError(f"is empty; it needs the columns {lacking}")
        if any(_VALUE.search(name) for name in present):
            first = ", ".join(columns[key] for key in matched if key != "split_column" and key not in optional)
            raise RowError(f"its first line has no column names; insert the line {first!r} above it")
        keys = " and ".join(f"data.source.{key}" for key in missing)
        present_names = ", ".join(map(repr, present))
        many = "s" if len(missing) > 1 else ""
        raise RowError(f"no column{many} {lacking} among {present_names}; set {keys} to the right one{many}")
    return {key: column for key, column in matched.items() if column is not None}


def _stored_rows(path: Path, columns: Mapping[str, str], optional: Collection[str]) -> Iterator[Cells]:
    """Rows of columnar tables; the split defaults to that of the file."""
    for file, split in stored.find_column_files(path):
        table = stored.open_columns(file)
        image_column = columns.get("image_column")  # the source opens embedded images by this name
        may_replace = image_column is None or find_column(image_column, table.names) is not None
        names = _find_columns(str(file), table.names, columns, optional, may_replace=may_replace)
        prefix = "" if file == path else f"{file.relative_to(path)} "
        has_images = "image_column" in names and table.is_image(names["image_column"])
        image_counts = table.counts(names["image_column"]) if has_images else None
        names = {key: name for key, name in names.items() if not (has_images and key == "image_column")}
        for number, row in enumerate(table.rows(list(names.values()))):
            values = {key: row[name] for key, name in names.items()}
            if has_images and image_counts is None:
                values["image_column"] = f"{file}/{number}"
            elif image_counts is not None:
                values["image_column"] = [f"{file}/{number}:{place}" for place in range(image_counts[number])]
            values |= {key: "" for key, value in values.items() if value is None and key != "split_column"}
            if split is not None and "split_column" in columns:
                values.setdefault("split_column", split)
            yield Cells(values, f"{prefix}row {number}")


def _delimited_rows(
    path: Path,
    rows: Iterator[TextRow],
    columns: Mapping[str, str],
    optional: Collection[str],
    notes: list[str],
    reject: RejectRow,
) -> Iterator[Cells]:
    """Rows of delimited text; the first one is the header. Missing cells at the end of a row are empty."""
    header = [name.strip() for name in next(rows, TextRow(0, [])).cells]
    named = _find_columns(str(path), header, columns, optional)
    for column in (column for column in named.values() if header.count(column) > 1):
        raise UserError(f"{path}: has {header.count(column)} columns {column!r}; rename or remove all but one")
    positions = {key: header.index(column) for key, column in named.items()}
    uneven, first = 0, 0
    for line, row in rows:
        where = f"line {line}"
        if len(row) > len(header) and any(row[len(header) :]):
            fields = f"{len(row)} fields for {len(header)} columns"
            reject(where, f'{fields}; put quotes (") around cells that contain the delimiter')
            continue
        if len(row) != len(header):
            uneven, first = uneven + 1, first or line
            row += [""] * (len(header) - len(row))
        yield Cells({key: row[position] for key, position in positions.items()}, where)
    if uneven:
        what = f"{uneven:,} row{'s' * (uneven > 1)} without as many cells as the header (the first: line {first})"
        notes.append(f"{path}: {what}; missing cells are read as empty, and further empty ones are ignored")


def _json_lines(text: str, reject: RejectRow) -> Iterator[tuple[str, JsonValue]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                value = parse_json(line)
            except (ValueError, RecursionError) as error:
                reject(f"line {number}", f"not JSON ({error}); give one object per line")
            else:
                yield f"line {number}", value


def _json_rows(
    path: Path,
    records: Iterable[tuple[str, JsonValue]],
    columns: Mapping[str, str],
    optional: Collection[str],
    reject: RejectRow,
) -> Iterator[Cells]:
    """Rows of JSON objects. A column that no object has is an error of the file, not of its rows."""
    records, first_records, present = iter(records), [], dict[str, None]()
    for where, record in records:  # until all columns are found, normally in the first
        first_records.append((where, record))
        present |= dict.fromkeys(record if isinstance(record, dict) else ())
        try:
            _match_columns(present, columns, optional)
            break
        except RowError:
            continue
    else:
        if present:
            columns = {**columns, **_find_columns(str(path), present, columns, optional)}
    for where, record in chain(first_records, records):
        if not isinstance(record, dict):
            reject(where, "not a JSON object; every row must be one")
            continue
        try:
            names = _match_columns(record, columns, optional)
        except RowError as error:
            reject(where, error)
            continue
        yield Cells({key: record[column] for key, column in names.items()}, where)
