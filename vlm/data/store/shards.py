"""Samples in shards (tars in WebDataset's layout), read in place by an index of offsets."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from vlm.data.images.image import SUFFIXES, ImageError, load_image
from vlm.data.store import storage
from vlm.data.text.words import to_single_line
from vlm.errors import UserError
from vlm.io.files import atomic_write
from vlm.untrusted.sizes import JsonValue
from vlm.untrusted.tars import Span, TarError, iter_members

FORMAT = 2  # 2: reads suffixes in capitals, and the text file if captions of the metadata are empty
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


class SkippedPart(NamedTuple):
    """An unused part of a shard: the kind of problem as in `SkipMessage`, or ``repeated``, and a message."""

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
        """All records in order; faster than calling `record` for each."""
        start = 0
        for end in self.places[:, 2].tolist():
            yield ShardRecord(*json.loads(self._records[start:end]))
            start = end

    @property
    def skipped_parts(self) -> list[SkippedPart]:
        start = int(self.places[-1, 2]) if len(self) else 0
        return [SkippedPart(*line) for line in json.loads(self._records[start:])]

    def to_bytes(self) -> bytes:
        """The contents of an index file."""
        rest = self.places.astype("<i8").tobytes() + self._records
        header = {"format": FORMAT, "tar": self.size, "samples": len(self), "digest": digest(rest)}
        return json.dumps(header).encode() + b"\n" + rest


def digest(data: bytes) -> str:
    """A hash that detects damage."""
    return blake2b(data, digest_size=16).hexdigest()


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
    for record in index.records():
        texts = [record.member, record.name or "", record.label or ""]
        if not isinstance(record.captions, list) or not all(isinstance(text, str) for text in texts + record.captions):
            raise ValueError("has invalid records")
    lines = json.loads(index._records[int(ends[-1]) if count else 0 :])
    if not isinstance(lines, list) or not all(isinstance(text, str) for line in lines for text in SkippedPart(*line)):
        raise ValueError("has invalid messages")
    return index


SUFFIX = ".index"
TEXTS = ("txt", "json", "cls")
MAX_TEXT = 2**20  # bytes of captions, metadata or a class


def open_index(path: str, *, write: bool) -> ShardIndex:
    """Opens the index of a shard, or creates it.

    Args:
        path: Path or URL of the tar.
        write: Whether to save a new index next to a local tar, if possible.
    Raises:
        UserError: The tar is missing, incomplete or damaged.
    """
    try:
        size = storage.get_file_size(path)
        with suppress(OSError, ValueError, TypeError, RecursionError):
            # The index of a local tar must not be older than the tar.
            if storage.is_url(path) or os.stat(path + SUFFIX).st_mtime_ns >= os.stat(path).st_mtime_ns:
                return parse_index(storage.read_file(path + SUFFIX, MAX_INDEX), size)
        index = build_index(path)
    except (OSError, TarError) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise UserError(f"{path}: cannot be read as a tar ({reason}); give a complete, uncompressed one") from (fault)
    if write and not storage.is_url(path):
        with suppress(OSError), atomic_write(path + SUFFIX) as file:  # optional: otherwise it is created each time
            file.write(index.to_bytes())
    return index


def build_index(path: str) -> ShardIndex:
    """Creates the index of a shard from its headers and texts, without reading images.

    Raises:
        TarError: It is not a tar, or incomplete or damaged.
        OSError: It cannot be read.
    """
    samples: dict[str, _Parts] = {}
    skipped: list[SkippedPart] = []
    with storage.open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        for name, span in iter_members(file):
            if span is not None:
                _add_member(samples, name.encode("utf-8", "backslashreplace").decode(), span, file, skipped)
    entries = [_build_record(key, parts, skipped) for key, parts in samples.items()]
    usable = [entry for entry in entries if entry is not None]
    records = [json.dumps(record).encode() for _, record in usable]
    ends = np.cumsum([len(record) for record in records], dtype=np.int64)
    spans = np.array([span for span, _ in usable], np.int64).reshape(-1, 2)
    return ShardIndex(np.column_stack([spans, ends]), b"".join(records) + json.dumps(skipped).encode(), size)


class _Parts(NamedTuple):
    """The parts of a sample in a tar: position of the image by path, and texts by type."""

    images: dict[str, Span]
    texts: dict[str, str | None]


def _add_member(samples: dict[str, _Parts], name: str, span: Span, file: BinaryIO, skipped: list[SkippedPart]) -> None:
    """Adds a member to its sample, with its content if it is a text."""
    folder, slash, base = name.rpartition("/")
    stem, _, kind = base.partition(".")
    kind = kind.lower()
    is_image = f".{kind}" in SUFFIXES
    if not stem or not (is_image or kind in TEXTS):
        if os.path.splitext(base)[1].lower() in SUFFIXES and stem:
            skipped.append(SkippedPart("", f"{name}: is ignored, because its name has two dots"))
        return
    parts = samples.setdefault(folder + slash + stem, _Parts({}, {}))
    if parts.images if is_image else kind in parts.texts:
        skipped.append(SkippedPart("", f"{name}: its sample already has one"))
    elif is_image:
        parts.images[name] = span
    else:
        parts.texts[kind] = _read_member_text(name, span, file, skipped)


def _build_record(key: str, parts: _Parts, skipped: list[SkippedPart]) -> tuple[Span, ShardRecord] | None:
    if not parts.images:
        skipped.append(SkippedPart("no image", f"{key}: has no image"))
        return None
    ((member, span),) = parts.images.items()
    metadata = _parse_metadata(key, parts.texts["json"], skipped) if parts.texts.get("json") is not None else {}
    name, label = metadata.get("name"), parts.texts.get("cls")
    captions = list(_read_captions(member, metadata, parts.texts.get("txt"), skipped))
    id = _replace_surrogates(name) if isinstance(name, str) and name else None
    return span, ShardRecord(member, id, label.strip() if label else None, captions)


def _read_member_text(name: str, span: Span, file: BinaryIO, skipped: list[SkippedPart]) -> str | None:
    if span.size > MAX_TEXT:
        skipped.append(SkippedPart("", f"{name}: has {span.size:,} bytes; at most {MAX_TEXT:,} are allowed"))
        return None
    file.seek(span.offset)
    try:
        return file.read(span.size).decode("utf-8-sig")
    except UnicodeDecodeError:
        skipped.append(SkippedPart("", f"{name}: is not UTF-8"))
        return None


def _parse_metadata(key: str, text: str | None, skipped: list[SkippedPart]) -> dict[str, JsonValue]:
    try:
        metadata = json.loads(text or "")
    except (ValueError, RecursionError):
        metadata = None
    if not isinstance(metadata, dict):
        skipped.append(SkippedPart("", f"{key}.json: is not a JSON object"))
        return {}
    return metadata


def _replace_surrogates(text: str) -> str:
    """Replaces halves of surrogate pairs, which JSON may contain but UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _read_captions(
    member: str, metadata: dict[str, JsonValue], lines: str | None, skipped: list[SkippedPart]
) -> Iterator[str]:
    """The captions of the metadata (a list or a single one), or the lines of the text if these are empty or null."""
    captions = next((metadata[key] for key in ("captions", "caption") if metadata.get(key)), None)
    if captions is None:
        captions = lines.rstrip().split("\n") if lines else []
    unique = set()
    for caption in captions if isinstance(captions, list) else [captions]:
        text = to_single_line(_replace_surrogates(caption)) if isinstance(caption, str) else ""
        if not text:
            skipped.append(SkippedPart("empty caption", f"{member}: no caption"))
        elif text in unique:
            skipped.append(SkippedPart("repeated", f"{member}: repeats a caption: {text}"))
        else:
            unique.add(text)
            yield text


@dataclass(frozen=True)
class IndexedShard:
    """A shard: its path, its name within ids of samples, and its index."""

    path: str
    name: str
    index: ShardIndex

    def sample(self, record: ShardRecord) -> str:
        """Id of a sample: the one of the original data set, or else SHARD/MEMBER."""
        return record.name or f"{self.name}/{record.member}"


class Samples:
    """Samples of several shards, concatenated.

    Args:
        shards: The shards.
        places: Shard and index in it of each sample.
    Shapes:
        places int64 (N, 2)
    """

    def __init__(self, shards: Sequence[IndexedShard], places: np.ndarray) -> None:
        self.shards, self.places = shards, places
        self._stamps: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.places)

    def part(self, indices: Sequence[int]) -> "Samples":
        """A subset of the samples."""
        return Samples(self.shards, self.places[np.asarray(indices, np.int64)])

    def shard(self, index: int) -> IndexedShard:
        """The shard of a sample."""
        return self.shards[self.places[index, 0]]

    def record(self, index: int) -> ShardRecord:
        return self.shard(index).index.record(int(self.places[index, 1]))

    def name(self, index: int) -> str:
        """Id of a sample."""
        return self.shard(index).sample(self.record(index))

    def content(self, index: int) -> bytes:
        """The bytes of an image file; raises ImageError if they cannot be read."""
        shard = self.shard(index)
        try:
            return storage.read_span(shard.path, shard.index.span(int(self.places[index, 1])))
        except (OSError, ValueError) as fault:
            raise ImageError(f"{self._path(index)}: {getattr(fault, 'strerror', None) or fault}") from fault

    def image(self, index: int) -> Image.Image:
        """The image in RGB; raises ImageError if it cannot be read."""
        return load_image(self.content(index), self._path(index))

    def stamp(self, index: int) -> str:
        """A string that changes when an image changes: the stamp of its shard and its position."""
        path = self.shard(index).path
        if path not in self._stamps:
            self._stamps[path] = storage.get_file_stamp(path)
        return f"{self._stamps[path]} {self.shard(index).index.span(int(self.places[index, 1]))}"

    def _path(self, index: int) -> str:
        return f"{self.shard(index).path}/{self.record(index).member}"
