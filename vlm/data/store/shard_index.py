"""The offset index of a shard: the position of each sample in the tar, for random access.

A shard is a tar in WebDataset's layout: files with the same path up to the first dot form a sample, and the rest of the
name is the type: an image by its suffix, ``txt`` with one caption per line, ``json`` with ``caption`` or ``captions``
(as written by img2dataset) and optionally ``name``, ``cls`` with a class.

The index is stored next to the tar as ``NAME.tar.index``: a line of JSON with a hash of the rest; for each sample, the
offset and size of its image and the end of its record, as three little-endian int64; the records as JSON; and one more
record with everything that was left out.
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from vlm.data.store.tar import Span

FORMAT = 2  # 2: suffixes in capitals, and texts beside empty captions of the metadata, are read
MAX_HEADER = 2**12
MAX_INDEX = 2**31  # bytes of an index


class ShardRecord(NamedTuple):
    """An entry of an index, without the position of the image.

    Args:
        member: Path of the image in the tar.
        name: Id of the sample in the data set that the shard was written from, or None.
        label: Its class as written in the shard, or None.
        captions: Its captions.
    """

    member: str
    name: str | None
    label: str | None
    captions: list[str]


class LeftOut(NamedTuple):
    """An unused part of a shard: the kind of problem as in `Skipped`, or ``repeated``, and a message."""

    kind: str
    line: str


class ShardIndex:
    """The samples of a shard, in the order of the tar.

    Args:
        places: Offset and size of each image, and end of its record.
        records: All records.
        size: Size of the tar in bytes, to detect an index of another tar.
    Shapes:
        places int64 (N, 3)
    """

    def __init__(self, places: np.ndarray, records: bytes, size: int) -> None:
        self.places, self._records, self.size = places, records, size

    def __len__(self) -> int:
        return len(self.places)

    def span(self, at: int) -> Span:
        return Span(int(self.places[at, 0]), int(self.places[at, 1]))

    def record(self, at: int) -> ShardRecord:
        start = int(self.places[at - 1, 2]) if at else 0
        return ShardRecord(*json.loads(self._records[start : int(self.places[at, 2])]))

    def records(self) -> Iterator[ShardRecord]:
        """All records in order; faster than one by one."""
        start = 0
        for end in self.places[:, 2].tolist():
            yield ShardRecord(*json.loads(self._records[start:end]))
            start = end

    @property
    def left_out(self) -> list[LeftOut]:
        start = int(self.places[-1, 2]) if len(self) else 0
        return [LeftOut(*line) for line in json.loads(self._records[start:])]

    def to_bytes(self) -> bytes:
        """The contents of an index file."""
        rest = self.places.astype("<i8").tobytes() + self._records
        header = {"format": FORMAT, "tar": self.size, "samples": len(self), "digest": digest(rest)}
        return json.dumps(header).encode() + b"\n" + rest


def digest(data: bytes) -> str:
    """A hash that detects damage."""
    return blake2b(data, digest_size=16).hexdigest()


def make_index(samples: list[tuple[Span, ShardRecord]], left_out: list[LeftOut], size: int) -> ShardIndex:
    """Creates the index of these samples of a tar with `size` bytes."""
    records = [json.dumps(record).encode() for _, record in samples]
    ends = np.cumsum([len(record) for record in records], dtype=np.int64)
    spans = np.array([span for span, _ in samples], np.int64).reshape(-1, 2)
    return ShardIndex(np.column_stack([spans, ends]), b"".join(records) + json.dumps(left_out).encode(), size)


def parse_index(data: bytes, size: int | None = None) -> ShardIndex:
    """Parses and validates an index file, which may come from an untrusted source.

    Args:
        size: Size of the tar; None if unknown, then the index is not checked against it.
    Raises:
        ValueError: It is invalid, incomplete, or belongs to another tar.
    """
    line, _, rest = data.partition(b"\n")
    header = json.loads(line[:MAX_HEADER])
    if not isinstance(header, dict) or header.get("format") != FORMAT or type(header.get("tar")) is not int:
        raise ValueError("has another format")
    if size is None:
        size = header["tar"]
    elif header["tar"] != size:
        raise ValueError("belongs to another tar")
    count = header.get("samples")
    if type(count) is not int or not 0 <= 24 * count <= len(rest) or header.get("digest") != digest(rest):
        raise ValueError("is incomplete")
    places = np.frombuffer(rest, "<i8", 3 * count).reshape(count, 3)
    offsets, sizes, ends = places.T
    inside = (offsets >= 0) & (sizes >= 0) & (offsets <= size) & (sizes <= size - offsets)
    index = ShardIndex(places, rest[24 * count :], size)
    if not inside.all() or (np.diff(ends, prepend=0) < 0).any() or (count and ends[-1] > len(index._records)):
        raise ValueError("has positions outside of the tar")
    if not all(map(_is_record, index.records())):
        raise ValueError("has invalid records")
    lines = json.loads(index._records[int(ends[-1]) if count else 0 :])
    if not isinstance(lines, list) or not all(isinstance(text, str) for line in lines for text in LeftOut(*line)):
        raise ValueError("has invalid messages")
    return index


def _is_record(record: ShardRecord) -> bool:
    texts = [record.member, record.name or "", record.label or ""]
    return all(isinstance(text, str) for text in texts) and (
        isinstance(record.captions, list) and all(isinstance(text, str) for text in record.captions)
    )
