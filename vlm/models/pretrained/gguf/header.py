"""Reads the header of a GGUF file: values by key, and the position of each tensor.

The library `gguf` trusts the counts in a file, so that a file may exhaust memory, and takes seconds to read a
vocabulary. Here every count is checked against the size of the file first.
"""

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_BYTES, MOST_VALUES = 2**24, 2**20  # limits of a header; Llama 3, with 128,000 tokens, has 2**23 and 2**19
MOST_AXES, MOST_TENSORS = 4, 2**16
STRING, ARRAY = 8, 9
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # type codes, as in `struct`


class Place(NamedTuple):
    """The position of a tensor in its file.

    Args:
        path: The file, or the part of a split file.
        kind: Number of its type.
        shape: Its sizes, rows first.
        start: Offset of its first byte.
    """

    path: Path
    kind: int
    shape: tuple[int, ...]
    start: int


class Header(NamedTuple):
    """The part of a file before the weights."""

    values: dict[str, Any]
    tensors: dict[str, Place]


def read_header(path: Path) -> Header:
    """Reads the header of a file.

    Raises:
        ValueError: It is damaged, or exceeds the limits.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        cursor = _Cursor(file.read(MOST_BYTES))
    if cursor.bytes(4) != MAGIC:
        raise ValueError("it is no GGUF file")
    version = cursor.number("I")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise ValueError("it is a big-endian file; convert it with the command gguf-convert-endian of the library gguf")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}, which is not 2 or 3")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    values: dict[str, Any] = {}
    for _ in range(cursor.count(keys, 13)):
        key = cursor.text()
        if key in values:
            raise ValueError(f"it has {key!r:.60} twice")
        values[key] = cursor.value(cursor.number("I"))
    places: dict[str, Place] = {}
    for _ in range(min(cursor.count(tensors, 24), MOST_TENSORS)):
        name = cursor.text()
        axes = cursor.number("I")
        if axes > MOST_AXES or name in places:
            raise ValueError(f"the tensor {name!r:.60} has {axes} axes, or is there twice")
        sizes = [cursor.number("Q") for _ in range(axes)]
        places[name] = Place(path, cursor.number("I"), tuple(reversed(sizes)), cursor.number("Q"))
    align = values.get("general.alignment", 32)
    if type(align) is not int or not 8 <= align <= 2**16:
        raise ValueError(f"general.alignment is {align!r:.60}, not a number from 8 to 65536")
    first = math.ceil(cursor.place / align) * align
    return Header(values, {name: one._replace(start=first + one.start) for name, one in places.items()})


class _Cursor:
    """Reads values one after another; raises ValueError at the end."""

    def __init__(self, content: bytes) -> None:
        self.content, self.place, self.left = content, 0, MOST_VALUES

    def bytes(self, count: int) -> bytes:
        start, self.place = self.place, self.place + count
        if self.place > len(self.content):
            raise ValueError("it ends too early, or its header is larger than any real one")
        return self.content[start : self.place]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))[0]

    def count(self, stated: int, least: int) -> int:
        """Checks and returns a number of items that take at least `least` bytes each."""
        self.left -= stated
        if stated * least > len(self.content) - self.place or self.left < 0:
            raise ValueError(f"it states {stated:,} values, more than it holds or any real one has")
        return stated

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int, *, inside: bool = False) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY and not inside:
            kind, stated = self.number("I"), self.number("Q")
            if kind not in NUMBERS:
                return [self.value(kind, inside=True) for _ in range(self.count(stated, 8))]
            code = NUMBERS[kind]
            size = struct.calcsize(f"<{code}")
            return list(struct.unpack(f"<{stated}{code}", self.bytes(self.count(stated, size) * size)))
        if kind not in NUMBERS:
            raise ValueError(f"a value has the type {kind}, which is unknown")
        return self.number(NUMBERS[kind])
