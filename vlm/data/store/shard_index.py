"""The offset index of a tar: the place of each sample of a shard, so that it can be read by itself.

A shard is a tar in WebDataset's layout: files that share their path up to the first dot of their name are a sample, and
what follows the dot says what each is: an image by its suffix, ``txt`` with a caption a line, ``json`` with ``caption``
or ``captions`` (as img2dataset writes both) and perhaps ``name``, ``cls`` with a class.

The index lies beside the tar as ``NAME.tar.index``: a line of JSON with a hash of the rest; for each sample the offset
and the size of its image and where its record ends, three times int64, little-endian; the records, JSON each; and one
more, of what was left out.
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from vlm.data.store.tar import Span

FORMAT = 1
MAX_HEADER = 2**12
MAX_INDEX = 2**31  # bytes of an index


class ShardRecord(NamedTuple):
    """An entry of an index, beside the place of the image.

    Args:
        member: Path of the image within the tar.
        name: What the sample is called in the data set that the shard was written from, if it says so.
        label: Its class as the shard has it, if it has one.
        captions: Its captions.
    """

    member: str
    name: str | None
    label: str | None
    captions: list[str]


class LeftOut(NamedTuple):
    """A part of a shard that is not used: the kind of the fault as `Skipped` has it, or ``repeated``, and a line."""

    kind: str
    line: str


class ShardIndex:
    """The samples of a shard, in the order in which they begin in the tar.

    Args:
        places: Offset and size of each image, and where its record ends.
        records: All records.
        size: Of the tar in bytes, by which the index is known to be its own.
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
        """All records in order, faster than one by one."""
        start = 0
        for end in self.places[:, 2].tolist():
            yield ShardRecord(*json.loads(self._records[start:end]))
            start = end

    @property
    def left_out(self) -> list[LeftOut]:
        start = int(self.places[-1, 2]) if len(self) else 0
        return [LeftOut(*line) for line in json.loads(self._records[start:])]

    def to_bytes(self) -> bytes:
        """The file's content."""
        rest = self.places.astype("<i8").tobytes() + self._records
        header = {"format": FORMAT, "tar": self.size, "samples": len(self), "digest": digest(rest)}
        return json.dumps(header).encode() + b"\n" + rest


def digest(data: bytes) -> str:
    """A hash that tells of damage."""
    return blake2b(data, digest_size=16).hexdigest()


def make_index(samples: list[tuple[Span, ShardRecord]], left_out: list[LeftOut], size: int) -> ShardIndex:
    """The index of these samples of a tar of so many bytes."""
    records = [json.dumps(record).encode() for _, record in samples]
    ends = np.cumsum([len(record) for record in records], dtype=np.int64)
    spans = np.array([span for span, _ in samples], np.int64).reshape(-1, 2)
    return ShardIndex(np.column_stack([spans, ends]), b"".join(records) + json.dumps(left_out).encode(), size)


def parse_index(data: bytes, size: int | None = None) -> ShardIndex:
    """The index in a file's content, every value of it checked: it may have come with the shard from anywhere.

    Args:
        size: Of the tar; None where it is not at hand, and the index is believed.
    Raises:
        ValueError: It is none, not whole, or of another tar.
    """
    line, _, rest = data.partition(b"\n")
    header = json.loads(line[:MAX_HEADER])
    if not isinstance(header, dict) or header.get("format") != FORMAT or type(header.get("tar")) is not int:
        raise ValueError("is of another format")
    if size is None:
        size = header["tar"]
    elif header["tar"] != size:
        raise ValueError("is of another tar")
    count = header.get("samples")
    if type(count) is not int or not 0 <= 24 * count <= len(rest) or header.get("digest") != digest(rest):
        raise ValueError("is not whole")
    places = np.frombuffer(rest, "<i8", 3 * count).reshape(count, 3)
    offsets, sizes, ends = places.T
    inside = (offsets >= 0) & (sizes >= 0) & (offsets <= size) & (sizes <= size - offsets)
    index = ShardIndex(places, rest[24 * count :], size)
    if not inside.all() or (np.diff(ends, prepend=0) < 0).any() or (count and ends[-1] > len(index._records)):
        raise ValueError("has places outside of the tar")
    if not all(map(_is_record, index.records())):
        raise ValueError("has records that are none")
    lines = json.loads(index._records[int(ends[-1]) if count else 0 :])
    if not isinstance(lines, list) or not all(isinstance(text, str) for line in lines for text in LeftOut(*line)):
        raise ValueError("has lines that are none")
    return index


def _is_record(record: ShardRecord) -> bool:
    texts = [record.member, record.name or "", record.label or ""]
    return all(isinstance(text, str) for text in texts) and (
        isinstance(record.captions, list) and all(isinstance(text, str) for text in record.captions)
    )
