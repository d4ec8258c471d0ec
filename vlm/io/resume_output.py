"""Continuation of a file of captions that an earlier command began."""

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
    """A test of whether an image's captions are in the file already.

    A kill may leave a line or the captions of an image half written at the file's end: they are cut off.

    Args:
        out: The file; what an earlier command has left unfinished beside it is taken first.
        form: "text", "jsonl" or "csv".
        columns: The fields of a record.
        paths: The images that are to be captioned.
        results: Captions an image.
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
        images, ends = {"text": _text, "jsonl": _json_lines, "csv": _csv}[form](content, columns)
        written = {_written(path, form) for path in paths}
        if images and not any(image in written or os.path.exists(image) for image in images):
            raise ValueError("its images are unknown")
        count = Counter(images)
        others = [count[image] for image in count if image != images[-1]]  # which are whole
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
    if images and count[images[-1]] < results:  # of one that was under way; others may have fewer texts, too
        del ends[-count[images[-1]] :]
        del images[-count[images[-1]] :]
    os.truncate(file, ends[-1])
    done = set(images)
    return lambda path: _written(path, form) in done


def _written(path: str, form: str) -> str:
    """A path as the file has it."""
    if form == "text":
        return printable(path)
    return path if form == "jsonl" else path.encode(errors="backslashreplace").decode()


def _begins(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)


def _beginnings(form: str, columns: Sequence[str], images: Collection[str]) -> list[str]:
    """Beginnings of what a kill may have cut."""
    if form == "jsonl":
        return [json.dumps({columns[0]: ""})[:-2]]
    if form == "text":
        return [f"{image}\t" for image in images]
    return [csv_text([columns]), *(csv_text([[image]]).rstrip("\n") for image in images)]


def _lines(content: bytes) -> list[bytes]:
    """The whole lines, each with its end."""
    lines = content.split(b"\n")
    return [line + b"\n" for line in lines[:-1]]


def _text(content: bytes, columns: Sequence[str]) -> tuple[list[str], list[int]]:
    """The image of each record, and where each record ends, that of none first."""
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
    """A record may take several lines: a name may hold a newline."""
    lines, rows = _lines(content), list[tuple[list[str], int]]()
    ends = list(accumulate(map(len, lines), initial=0))
    reader = csv.reader((line.decode() for line in lines), strict=True)
    try:
        rows += ((row, ends[reader.line_num]) for row in reader)
    except csv.Error as fault:
        if reader.line_num < len(lines):  # else a quote is open at the end: the record was cut
            raise ValueError(str(fault)) from fault
    if any(len(row) != len(columns) for row, _ in rows) or (rows and rows[0][0] != list(columns)):
        raise ValueError("other columns")
    return [row[0] for row, _ in rows[1:]], [end for _, end in rows] or [0]
