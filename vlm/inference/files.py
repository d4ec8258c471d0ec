"""Image files of the commands, and their progress."""

import glob
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vlm.data.images.image import SUFFIXES
from vlm.errors import UserError


def listed(inputs: Sequence[str]) -> list[str]:
    """The arguments, those that stdin names, one a line, in the place of "-"."""
    lines = [line.rstrip("\r\n") for line in sys.stdin] if "-" in inputs else []
    return [name for item in inputs for name in (filter(None, lines) if item == "-" else [item])]


def find_images(inputs: Sequence[str], *, repeated: bool = False) -> list[str]:
    """The image files that the arguments name: files as they are, folders searched through, patterns expanded.

    "-" stands for the files, folders and patterns that stdin names, one a line.

    Args:
        repeated: Whether a file that is named again comes again.
    Raises:
        UserError: A folder or pattern holds no image.
    """
    paths: list[str] = []
    for place in listed(inputs):
        if os.path.isdir(place):
            matches = sorted(str(path) for path in Path(place).rglob("*") if path.suffix.lower() in SUFFIXES)
        elif not os.path.exists(place) and glob.has_magic(place):
            matches = sorted(path for path in glob.glob(place, recursive=True) if not os.path.isdir(path))
        else:
            matches = [place]
        if not matches:
            raise UserError(f"{place}: no images found; give image files, a folder that holds some, or a pattern")
        paths += matches
    return paths if repeated else list(dict.fromkeys(paths))


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
