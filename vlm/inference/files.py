"""Inputs and outputs of the commands that use a model."""

import csv
import glob
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

from vlm.data.images.image import SUFFIXES
from vlm.errors import UserError, printable


def find_images(inputs: Sequence[str]) -> list[str]:
    """The image files that the arguments name: files as they are, folders searched through, patterns expanded.

    "-" stands for the files, folders and patterns that stdin names, one a line.

    Raises:
        UserError: A folder or pattern holds no image.
    """
    found: list[str] = []
    lines = [line.rstrip("\n") for line in sys.stdin] if "-" in inputs else []
    for given in (name for item in inputs for name in (filter(None, lines) if item == "-" else [item])):
        if os.path.isdir(given):
            matches = sorted(str(path) for path in Path(given).rglob("*") if path.suffix.lower() in SUFFIXES)
        elif not os.path.exists(given) and glob.has_magic(given):
            matches = sorted(path for path in glob.glob(given, recursive=True) if not os.path.isdir(path))
        else:
            matches = [given]
        if not matches:
            raise UserError(f"{given}: no images found; give image files, a folder that holds some, or a pattern")
        found += matches
    return list(dict.fromkeys(found))


class Writer:
    """Writes records as they come, to a file or to stdout.

    Args:
        form: "text" (the given fields between tabs), "jsonl" or "csv".
        fields: The fields of a line of text.
        out: Path of the file; None for stdout.
        append: Whether to go on after what the file holds.
    Raises:
        UserError: The form is unknown, or the file cannot be written.
    """

    def __init__(self, *, form: str, fields: Sequence[str], out: str | None = None, append: bool = False) -> None:
        if form not in ("text", "jsonl", "csv"):
            raise UserError(f"--format: {form!r} is unknown; choose text, jsonl or csv")
        self.form, self.fields = form, fields
        try:
            mode: Literal["a", "w"] = "a" if append else "w"
            self.file: TextIO = sys.stdout if out is None else open(out, mode, encoding="utf-8", newline="")  # noqa: SIM115
        except OSError as fault:
            raise UserError(f"--out {out}: cannot be written ({fault.strerror}); choose another file") from fault
        self._header = form == "csv" and not (append and out is not None and os.path.getsize(out))

    def write(self, record: dict[str, Any]) -> None:
        if self.form == "text":
            self.file.write("\t".join(printable(str(record[field])) for field in self.fields) + "\n")
        elif self.form == "jsonl":
            self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
        else:
            writer = csv.DictWriter(self.file, list(record), lineterminator="\n")
            if self._header:
                writer.writeheader()
                self._header = False
            writer.writerow(record)
        self.file.flush()

    def close(self) -> None:
        if self.file is not sys.stdout:
            self.file.close()


def progress(items: Iterable[Any], total: int, unit: str) -> Iterator[Any]:
    """Passes items on; tells on stderr, if a person reads it, how many are done, how fast, and what is left."""
    start, shown = time.monotonic(), 0.0
    visible = sys.stderr.isatty() and total > 16
    for done, item in enumerate(items):
        now = time.monotonic()
        if visible and done and now - shown > 0.5:
            shown, rate = now, done / (now - start)
            left = int((total - done) / rate)
            print(
                f"\r{done}/{total} {unit}  {rate:.1f}/s  {left // 60}:{left % 60:02d} left \033[K",
                end="",
                file=sys.stderr,
                flush=True,
            )
        yield item
    if visible:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
