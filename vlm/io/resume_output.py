"""Continues a file of captions that an earlier command began."""

import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from pathlib import Path

from vlm.errors import UserError, printable
from vlm.io.output import csv_text, part


def begun(
    out: str, *, form: str, columns: Sequence[str], paths: Collection[str], results: int = 1
) -> Callable[[str], bool]:
    """Returns a function that tells whether the file already has an image's captions.

    If the earlier command was killed, the last line or image may be incomplete; it is cut off.

    Args:
        out: The file; an unfinished `FILE.part` of an earlier command is preferred.
        form: "text", "jsonl" or "csv".
        columns: The fields of a record.
        paths: The images to caption.
        results: Number of captions per image.
    Raises:
        UserError: The file cannot be read, or was not written by this command in this form.
    """
    file = part(out) if os.path.exists(part(out)) else out
    try:
        content = Path(file).read_bytes()
    except FileNotFoundError:
        return lambda path: False
    except OSError as fault:
        raise UserError(f"--out {file}: cannot be read ({fault.strerror}); choose another file") from fault
    try:
        images, ends = {"text": _read_text_records, "jsonl": _json_lines, "csv": _csv}[form](content, columns)
        written = {_written(path, form) for path in paths}
        if images and not any(image in written or os.path.exists(image) for image in images):
            raise ValueError("its images are unknown")
        count = Counter(images)
        others = [count[image] for image in count if image != images[-1]]  # these are complete
        if max(count.values(), default=0) > results or (form == "text" and max(others, default=results) == 1 < results):
            raise ValueError("another number of results")
        rest = content[ends[-1] :].decode(errors="ignore")
        if rest and not any(_begins(rest, beginning) for beginning in _beginnings(form, columns, written)):
            raise ValueError("its end is not that of a caption")
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as fault:
        raise UserError(
            f"--out {file}: was not written by this command in the form {form} with these options, so that --continue "
            "cannot go on with it; choose another file"
        ) from fault
    if images and count[images[-1]] < results:  # the last image may be incomplete; others may have fewer texts, too
        del ends[-count[images[-1]] :]
        del images[-count[images[-1]] :]
    os.truncate(file, ends[-1])
    done = set(images)
    return lambda path: _written(path, form) in done


def _written(path: str, form: str) -> str:
    """A path as written in the file."""
    if form == "text":
        return printable(path)
    return path if form == "jsonl" else path.encode(errors="backslashreplace").decode()


def _begins(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _beginnings(form: str, columns: Sequence[str], images: Collection[str]) -> list[str]:
    """Beginnings of records, one of which a truncated record must have."""
    if form == "jsonl":
        return [json.dumps({columns[0]: ""})[:-2]]
    if form == "text":
        return [f"{image}\t" for image in images]
    return [csv_text([columns]), *(csv_text([[image]]).rstrip("\n") for image in images)]


def _lines(content: bytes) -> list[bytes]:
    """The complete lines, with their line ends."""
    lines = content.split(b"\n")
    return [line + b"\n" for line in lines[:-1]]


def _read_text_records(content: bytes, columns: Sequence[str]) -> tuple[list[str], list[int]]:
    """The image of each record, and the end offset of each record, after a leading 0."""
    images, ends = [], [0]
    for line in _lines(content):
        text = line[:-1].decode()
        path, caption = text.split("\t")  # a caption's own tabs are escaped
        if printable(path + caption) != path + caption:
            raise ValueError("not printable")
        images.append(path)
        ends.append(ends[-1] + len(line))
    return images, ends


def _json_lines(content: bytes, columns: Sequence[str]) -> tuple[list[str], list[int]]:
    images, ends = [], [0]
    for line in _lines(content):
        record = json.loads(line)
        if list(record) != list(columns):
            raise ValueError("other fields")
        images.append(record[columns[0]])
        ends.append(ends[-1] + len(line))
    return images, ends


def _csv(content: bytes, columns: Sequence[str]) -> tuple[list[str], list[int]]:
    """Like `_text`; a record may take several lines, because file names may contain newlines."""
    lines, rows = _lines(content), list[tuple[list[str], int]]()
    ends = list(accumulate(map(len, lines), initial=0))
    reader = csv.reader((line.decode() for line in lines), strict=True)
    try:
        rows += ((row, ends[reader.line_num]) for row in reader)
    except csv.Error as fault:
        if reader.line_num < len(lines):  # otherwise a quote is open at the end: the last record is incomplete
            raise ValueError(str(fault)) from fault
    if any(len(row) != len(columns) for row, _ in rows) or (rows and rows[0][0] != list(columns)):
        raise ValueError("other columns")
    return [row[0] for row, _ in rows[1:]], [end for _, end in rows] or [0]
