"""Command arguments that are files, and a progress display."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def listed(inputs: Sequence[str]) -> list[str]:
    """The arguments, with "-" replaced by the lines of stdin."""
    lines = [line.removesuffix("\n").removesuffix("\r") for line in sys.stdin] if "-" in inputs else []
    return [name for item in inputs for name in (filter(None, lines) if item == "-" else [item])]


def progress(items: Iterable[Any], total: int, unit: str) -> Iterator[Any]:
    """Yields the items; on a terminal, stderr shows after a second how many are done, the rate, and the time left."""
    start = shown = time.monotonic()
    visible = sys.stderr.isatty()
    for done, item in enumerate(items):
        now = time.monotonic()
        if visible and done and now - shown > (0.5 if shown > start else 1.0):
            shown, rate = now, done / (now - start)
            left = int((total - done) / rate)
            print(
                f"\r{done}/{total} {unit}  {rate:.1f}/s  {left // 60}:{left % 60:02d} left \033[K",
                end="",
                file=sys.stderr,
                flush=True,
            )
        yield item
    if shown > start:
        print("\r\033[K", end="", file=sys.stderr, flush=True)
