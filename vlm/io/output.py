"""Output of the commands: the file of --out, replaced only when complete, or continued."""

import csv
import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

from vlm.errors import UserError, print_error, printable

FORMS = ("text", "jsonl", "csv")


class Output:
    """The file of an option such as --out, or stdout.

    It is opened on the first write, written as `FILE.part`, and renamed to FILE at the end. An existing FILE is kept
    until then, and for good if the command fails.

    Args:
        path: The file; None for stdout.
        option: The option that names it.
        inputs: Files that the command reads; none of them may be the output.
        append: Whether to continue the output of an earlier command: `FILE.part` if it was interrupted, else FILE.
    Raises:
        UserError: The file is an input, or cannot be written.
    """

    def __init__(
        self, path: str | None, *, option: str = "--out", inputs: Iterable[str] = (), append: bool = False
    ) -> None:
        self.path, self.option, self.append = path, option, append
        self._file: BinaryIO | None = None
        self._begun = False
        if path is None:
            return
        self._place = self._beside = path
        if is_special(path):
            return
        self._place = os.path.realpath(path)  # a link is kept
        self._beside = self._place if append and not os.path.exists(part(path)) else part(path)
        refuse_inputs(path, inputs, option=option)
        refuse_unwritable(self._place, f"{option} {path}")

    @property
    def empty(self) -> bool:
        """True if nothing was written yet, neither by this command nor by one that it continues."""
        if self._file is None and self.append and os.path.exists(self._beside):
            return not os.path.getsize(self._beside)
        return not self._begun

    def write(self, text: str | bytes) -> None:
        """Writes text at once; characters without UTF-8 form are escaped, in JSON as JSON does. Bytes need a file.

        Raises:
            UserError: The file cannot be written. For stdout, the OSError itself is raised, as by print.
        """
        self._begun = True
        if self.path is None and isinstance(text, str):
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            rest = memoryview(text.encode("utf-8", "backslashreplace") if isinstance(text, str) else text)
            while rest:  # a disk that is nearly full may accept a part
                rest = rest[self._opened().write(rest) :]
        except OSError as fault:
            raise self._unwritable(fault) from fault

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._file = open(self._beside, "ab" if self.append else "wb", buffering=0)  # noqa: SIM115
        return self._file

    def _unwritable(self, fault: OSError) -> UserError:
        return UserError(
            f"{self.option} {self.path}: cannot be written ({fault.strerror}); free space, or choose another file", 1
        )

    @property
    def plain(self) -> bool:
        """True if letters of all scripts can be written unescaped."""
        return self.path is not None or (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is None:
            return
        if kind is None and self.append and self._beside != self._place:
            self._opened()  # so that it is renamed even if nothing was left to do
        if self._file is None:
            return
        self._file.close()
        if self._beside == self._place:
            return
        if kind is not None:
            print_error(f"{self._beside} holds what was done; {self.path} is left as it was", "unfinished")
            return
        try:
            os.replace(self._beside, self._place)
        except OSError as failed:
            raise self._unwritable(failed) from failed


def part(path: str) -> str:
    """Path of the unfinished file for an output."""
    return f"{os.path.realpath(path)}.part"


def is_special(path: str) -> bool:
    """Returns True for a device or pipe, which cannot be replaced."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def refuse_inputs(path: str, inputs: Iterable[str], *, option: str = "--out") -> None:
    """Checks that an output is not one of the files that a command reads, under any name.

    Raises:
        UserError: It is one of them.
    """
    own = {identity(name) for name in (path, part(path))} - {None}
    for name in inputs if own and not is_special(path) else ():
        if identity(name) in own:
            raise UserError(f"{option} {path}: is also read ({name}), and would be lost; choose another file")


def identity(path: str) -> tuple[int, int] | None:
    """Device and inode number of a file, the same for all its names; None if it does not exist."""
    try:
        stored = os.stat(path)
    except (OSError, ValueError):
        return None
    return stored.st_dev, stored.st_ino


def refuse_unwritable(path: str, named: str) -> None:
    """Checks that a file can be written.

    Raises:
        UserError: It is a folder or not writable, or its folder is missing or not writable.
    """
    folder = os.path.dirname(path)
    faults = {
        "Is a directory": os.path.isdir(path),
        "No such file or directory": not os.path.exists(folder),
        "Not a directory": os.path.exists(folder) and not os.path.isdir(folder),
        "Permission denied": not os.access(path if os.path.exists(path) else folder, os.W_OK),
    }
    for reason in (reason for reason, there in faults.items() if there):
        raise UserError(f"{named}: cannot be written ({reason}); choose another file")


def output_folder(path: str, *, option: str = "--out", status: Literal[1, 2] = 2) -> Path:
    """Creates an output folder if it does not exist, and tests it before anything is computed.

    Raises:
        UserError: It cannot be created or written to.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".{os.getpid()}.trial"
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as fault:
        raise UserError(
            f"{option} {path}: cannot be written ({fault.strerror}); choose another folder", status
        ) from fault
    return folder


class Records:
    """Writes records one by one to a file or stdout.

    Args:
        form: "text" (some fields, separated by tabs), "jsonl" or "csv".
        fields: The fields of a line of text.
        output: The output to write to.
    Raises:
        UserError: The form is unknown.
    """

    def __init__(self, *, form: str, fields: Sequence[str], output: Output) -> None:
        if form not in FORMS:
            raise UserError(f"--format: {form!r} is unknown; choose text, jsonl or csv")
        self.form, self.fields, self.output = form, fields, output

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *fault: object) -> None:
        return None

    @property
    def live(self) -> bool:
        """True if text goes to stdout, where a user may watch it grow."""
        return self.form == "text" and self.output.path is None

    @property
    def watched(self) -> bool:
        """True if records go to a terminal."""
        return self.output.path is None and sys.stdout.isatty()

    def miss(self) -> None:
        """Records that an input has no record."""
        return None

    def write(self, record: Mapping[str, Any]) -> None:
        if self.form == "text":
            self.output.write(text_line(record[field] for field in self.fields))
        elif self.form == "jsonl":
            text = json.dumps(record, ensure_ascii=not self.output.plain)
            self.output.write((_escaped(text) if self.watched else text) + "\n")
        else:
            values = [printable(_text(value)) for value in record.values()] if self.watched else record.values()
            self.output.write(csv_text([*([list(record)] if self.output.empty else []), values]))


def _escaped(text: str) -> str:
    """Also escapes control characters above U+007E in JSON, because terminals execute some of them."""
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def text_line(cells: Iterable[Any]) -> str:
    """Joins cells by tabs; cells are escaped so that none breaks the line."""
    return "\t".join(printable(str(cell)) for cell in cells) + "\n"


def csv_text(rows: Iterable[Iterable[Any]], end: str = "\n") -> str:
    """Formats rows as CSV (RFC 4180, but with other line ends)."""
    return "".join(",".join(map(_cell, row)) + end for row in rows)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _cell(value: Any) -> str:
    text = _text(value)
    quoted = '"' + text.replace('"', '""') + '"'  # Python's own writer leaves a carriage return bare
    return quoted if any(char in text for char in ',"\r\n') else text


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows as columns: the first left-aligned, the others right-aligned."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


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
