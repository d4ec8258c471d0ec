"""Output of commands: the file of --out, which is replaced only when complete, or continued."""

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
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias

from vlm.errors import UserError, print_error, printable

if TYPE_CHECKING:
    import numpy as np

FORMS = ("text", "jsonl", "csv")
# A value of a record: JSON or, for binary formats, an array.
Value: TypeAlias = "str | float | np.ndarray | Sequence[Value] | Mapping[str, Value] | None"
Record: TypeAlias = "Mapping[str, Value]"


class Output:
    """The file of an option such as --out, or stdout.

    Output is written to `FILE.part`, which is created by the first write and renamed to FILE at the end. If the command
    fails, an existing FILE is unchanged.

    Args:
        path: The file; None for stdout.
        option: The option that names the file, for messages.
        inputs: Files that the command reads, which must not be the output.
        append: Whether to continue the output of an earlier command: `FILE.part` if it exists, else FILE.
    Raises:
        UserError: The file is an input, or cannot be written.
    """

    def __init__(
        self, path: str | None, *, option: str = "--out", inputs: Iterable[str] = (), append: bool = False
    ) -> None:
        self.path, self.option, self.append = path, option, append
        self._file: BinaryIO | None = None
        self._has_output = False
        if path is None:
            return
        self._target = self._temporary = path
        if is_special(path):
            return
        self._target = os.path.realpath(path)  # a symbolic link is kept
        self._temporary = self._target if append and not os.path.exists(part_path(path)) else part_path(path)
        outputs = {file_identity(name) for name in (path, part_path(path))} - {None}
        for name in inputs if outputs else ():  # a file that the command reads, under any name
            if file_identity(name) in outputs:
                raise UserError(f"{option} {path}: is also an input ({name}); choose another file")
        refuse_unwritable(self._target, f"{option} {path}")

    @property
    def empty(self) -> bool:
        """Whether nothing was written yet, neither by this command nor by the one that it continues."""
        if self._file is None and self.append and os.path.exists(self._temporary):
            return not os.path.getsize(self._temporary)
        return not self._has_output

    def write(self, text: str | bytes) -> None:
        """Writes text without buffering. Characters that UTF-8 cannot encode are escaped. Bytes require a file.

        Raises:
            UserError: The file cannot be written. For stdout, the OSError is raised, as by print.
        """
        self._has_output = True
        if self.path is None and isinstance(text, str):
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        try:
            remaining = memoryview(text.encode("utf-8", "backslashreplace") if isinstance(text, str) else text)
            while remaining:  # an unbuffered write may be partial
                remaining = remaining[self._open().write(remaining) :]
        except OSError as fault:
            raise self._write_error(fault) from fault

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._file = open(self._temporary, "ab" if self.append else "wb", buffering=0)  # noqa: SIM115
        return self._file

    def _write_error(self, fault: OSError) -> UserError:
        return UserError(
            f"{self.option} {self.path}: cannot be written ({fault.strerror}); free space, or choose another file", 1
        )

    @property
    def plain(self) -> bool:
        """Whether the output can encode letters of all scripts."""
        return self.path is not None or (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path is None:
            return
        if kind is None and self.append and self._temporary != self._target:
            self._open()  # so that it is renamed even if no input remained
        if self._file is None:
            return
        self._file.close()
        if self._temporary == self._target:
            return
        if kind is not None:
            print_error(f"{self._temporary} has the partial output; {self.path} is unchanged", "unfinished")
            return
        try:
            os.replace(self._temporary, self._target)
        except OSError as error:
            raise self._write_error(error) from error


def part_path(path: str) -> str:
    """Returns the path of the partial file of an output."""
    return f"{os.path.realpath(path)}.part"


def is_special(path: str) -> bool:
    """Returns True for a device or pipe, which cannot be renamed."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def file_identity(path: str) -> tuple[int, int] | None:
    """Returns device and inode of a file, which are the same for all its names; None if it does not exist."""
    try:
        stored = os.stat(path)
    except (OSError, ValueError):
        return None
    return stored.st_dev, stored.st_ino


def refuse_unwritable(path: str, label: str) -> None:
    """Checks that a file can be written.

    Args:
        label: The option and the file, for the message.
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
    for reason in (reason for reason, applies in faults.items() if applies):
        raise UserError(f"{label}: cannot be written ({reason}); choose another file")


def output_folder(path: str, *, option: str = "--out", status: Literal[1, 2] = 2) -> Path:
    """Creates an output folder if it does not exist, and checks that it is writable.

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
    """Writes records to a file or stdout.

    Args:
        form: "text" (fields separated by tabs), "jsonl" or "csv".
        fields: The fields of a text line.
        output: The output.
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
        """Whether text goes to stdout, where it can be streamed."""
        return self.form == "text" and self.output.path is None

    @property
    def is_terminal(self) -> bool:
        """Whether records go to a terminal."""
        return self.output.path is None and sys.stdout.isatty()

    def miss(self) -> None:
        """Notes that an input has no record."""
        return None

    def write(self, record: Record) -> None:
        if self.form == "text":
            self.output.write(text_line(record[field] for field in self.fields))
        elif self.form == "jsonl":
            text = json.dumps(record, ensure_ascii=not self.output.plain)
            if self.is_terminal:  # terminals execute some characters
                text = "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)
            self.output.write(text + "\n")
        else:
            values = (
                [printable(_format_value(value)) for value in record.values()] if self.is_terminal else record.values()
            )
            self.output.write(csv_text([*([list(record)] if self.output.empty else []), values]))


def text_line(cells: Iterable[Any]) -> str:
    """Joins cells with tabs and escapes characters that would break the line."""
    return "\t".join(printable(str(cell)) for cell in cells) + "\n"


def csv_text(rows: Iterable[Iterable[Any]], end: str = "\n") -> str:
    """Formats rows as CSV (RFC 4180, with line ends `end`)."""
    texts = ([_format_value(value) for value in row] for row in rows)
    quoted = (  # Python's own writer leaves a carriage return bare
        ['"' + text.replace('"', '""') + '"' if any(char in text for char in ',"\r\n') else text for text in row]
        for row in texts
    )
    return "".join(",".join(row) + end for row in quoted)


def _format_value(value: Any) -> str:
    return "" if value is None else str(value)


def align_columns(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows as columns: the first left-aligned, the others right-aligned."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def find_completed(
    out: str, *, form: str, columns: Sequence[str], paths: Collection[str], results: int = 1
) -> Callable[[str], bool]:
    """Returns a predicate that is True for images whose captions are in the output already.

    An incomplete last line or image of a killed command is cut off the file.

    Args:
        out: The output file; its `FILE.part` is preferred if it exists.
        form: "text", "jsonl" or "csv".
        columns: The fields of a record.
        paths: The images to caption.
        results: Number of captions per image.
    Raises:
        UserError: The file cannot be read, or was written by another command or in another form.
    """
    file = part_path(out) if os.path.exists(part_path(out)) else out
    try:
        content = Path(file).read_bytes()
    except FileNotFoundError:
        return lambda path: False
    except OSError as fault:
        raise UserError(f"--out {file}: cannot be read ({fault.strerror}); choose another file") from fault
    try:
        images, ends = (
            _read_csv_records(content, columns) if form == "csv" else _read_line_records(form, content, columns)
        )
        expected = {_format_path(path, form) for path in paths}
        if images and not any(image in expected or os.path.exists(image) for image in images):
            raise ValueError("its images are unknown")
        count = Counter(images)
        complete = [count[image] for image in count if image != images[-1]]
        has_single_captions = form == "text" and max(complete, default=results) == 1 < results
        if max(count.values(), default=0) > results or has_single_captions:
            raise ValueError("another number of results")
        partial = content[ends[-1] :].decode(errors="ignore")
        if form == "jsonl":  # how a record may begin
            prefixes = [json.dumps({columns[0]: ""})[:-2]]
        elif form == "text":
            prefixes = [f"{image}\t" for image in expected]
        else:
            prefixes = [csv_text([columns]), *(csv_text([[image]]).rstrip("\n") for image in expected)]
        if partial and not any(partial.startswith(prefix) or prefix.startswith(partial) for prefix in prefixes):
            raise ValueError("its end is not a partial caption")
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as fault:
        raise UserError(
            f"--out {file}: cannot be continued, because it was not written by this command with --format {form} and "
            "these options; choose another file"
        ) from fault
    if images and count[images[-1]] < results:  # the last image may be incomplete; any image may have fewer texts
        del ends[-count[images[-1]] :]
        del images[-count[images[-1]] :]
    os.truncate(file, ends[-1])
    done = set(images)
    return lambda path: _format_path(path, form) in done


def _format_path(path: str, form: str) -> str:
    """Formats a path as in the output."""
    if form == "text":
        return printable(path)
    return path if form == "jsonl" else path.encode(errors="backslashreplace").decode()


def _complete_lines(content: bytes) -> list[bytes]:
    """Returns the complete lines, with their line ends."""
    lines = content.split(b"\n")
    return [line + b"\n" for line in lines[:-1]]


def _read_line_records(form: str, content: bytes, columns: Sequence[str]) -> tuple[list[str], list[int]]:
    """Returns the image of each record, and the end offset of each record after a leading 0."""
    lines = _complete_lines(content)
    images = []
    for line in lines:
        if form == "text":
            path, caption = line[:-1].decode().split("\t")  # tabs in captions are escaped
            if printable(path + caption) != path + caption:
                raise ValueError("not printable")
            images.append(path)
        else:
            record = json.loads(line)
            if list(record) != list(columns):
                raise ValueError("other fields")
            images.append(record[columns[0]])
    return images, list(accumulate(map(len, lines), initial=0))


def _read_csv_records(content: bytes, columns: Sequence[str]) -> tuple[list[str], list[int]]:
    """Like `_read_line_records`; file names may contain newlines, so that a record may have several lines."""
    lines, rows = _complete_lines(content), list[tuple[list[str], int]]()
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
