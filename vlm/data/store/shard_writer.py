"""Writes a data set as shards: tars in WebDataset's layout with an index each, and a manifest."""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from vlm.data.images.image import SUFFIXES, ImageError
from vlm.data.records import Record, Split
from vlm.data.store.shard_list import FORMAT, MANIFEST
from vlm.data.store.shard_scan import SUFFIX, build_index
from vlm.errors import UserError
from vlm.io.atomic import atomic_write

Files = list[tuple[str, bytes]]  # suffix and content of each file of a sample

# Magic bytes of file formats, and their usual suffix.
# fmt: off
_SUFFIXES = {
    b"\xff\xd8": ".jpg", b"\x89PNG": ".png", b"RIFF": ".webp", b"GIF8": ".gif", b"BM": ".bmp", b"II": ".tif",
    b"MM": ".tif",
}
# fmt: on


def write_split(
    samples: Iterable[tuple[str, Files]], folder: Path, *, shard_size: int, shard_bytes: int
) -> list[dict[str, Any]]:
    """Writes the samples of a split as ``000000.tar`` and so on; returns the manifest entry of each shard.

    Shards are written atomically, and their index after them.

    Args:
        samples: Key and files of each sample.
        folder: Folder of the split.
        shard_size: Maximum number of samples per shard.
        shard_bytes: Size at which a shard is closed.
    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    waiting = iter(samples)
    first = next(waiting, None)
    while first is not None:
        path = folder / f"{len(entries):06d}.tar"
        entry, first = _write_shard(path, first, waiting, shard_size, shard_bytes)
        entries.append({"file": f"{folder.name}/{path.name}", **entry})
    return entries


def write_manifest(folder: Path, splits: dict[str, list[dict[str, Any]]], classes: list[str] | None) -> None:
    """Writes the manifest, which marks the data set as complete; called last."""
    content = {"format": FORMAT, "splits": splits} | ({} if classes is None else {"classes": classes})
    with atomic_write(folder / MANIFEST) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def _write_shard(
    path: Path, first: tuple[str, Files], waiting: Iterator[tuple[str, Files]], shard_size: int, shard_bytes: int
) -> tuple[dict[str, Any], tuple[str, Files] | None]:
    """Writes one shard; returns its entry and the first sample of the next one."""
    count = 0
    following: tuple[str, Files] | None = first
    with atomic_write(path) as file:
        digest = _Digest(file)
        while following is not None and count < shard_size and (count == 0 or digest.size < shard_bytes):
            for suffix, content in following[1]:
                digest.write(_member(following[0] + suffix, content))
            count += 1
            following = next(waiting, None)
        digest.write(bytes(2 * tarfile.BLOCKSIZE))
    with atomic_write(f"{path}{SUFFIX}") as file:
        file.write(build_index(str(path)).to_bytes())
    return {"samples": count, "bytes": digest.size, "sha256": digest.sha256.hexdigest()}, following


class _Digest:
    """Writes to a file and computes its size and checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)


def _member(name: str, content: bytes) -> bytes:
    """A regular file as a tar member; the bytes do not depend on time or user."""
    about = tarfile.TarInfo(name)
    about.size = len(content)
    padding = bytes(-len(content) % tarfile.BLOCKSIZE)
    return about.tobuf(tarfile.USTAR_FORMAT) + content + padding


def files_of(split: Split, lost: list[str]) -> Iterator[tuple[str, Files]]:
    """Yields key and files of each sample of a split; messages about unreadable images are added to `lost`."""
    for index, record in enumerate(split.records()):
        try:
            yield f"{index:09d}", record_files(record)
        except ImageError as fault:
            lost.append(str(fault))


def record_files(record: Record) -> Files:
    """The image, metadata, captions and class of a sample; raises ImageError if the image cannot be read.

    The metadata has all captions; the text file has one per line, for other programs.
    """
    about: dict[str, Any] = {"name": record.id}
    texts: Files = []
    if "references" in record:
        captions = record["references"]
        about |= {"caption": captions[0], "captions": captions}
        lines = "\n".join(" ".join(caption.splitlines()) for caption in captions)
        texts.append((".txt", lines.encode("utf-8", "replace")))
    if "label" in record:
        texts.append((".cls", str(record["label"]).encode()))
    return [image_file(record), (".json", json.dumps(about).encode()), *texts]


def image_file(record: Record) -> tuple[str, bytes]:
    """Suffix and content of an image file: the original bytes if there is a file, else a PNG.

    Raises:
        UserError: The record has several images.
    """
    if record.open_more:
        raise UserError(f"{record.id}: has several images, which shards do not support; use other data")
    if record.read_file is None:
        buffer = BytesIO()
        record.image().save(buffer, "PNG")
        return ".png", buffer.getvalue()
    content = record.read_file()
    suffix = os.path.splitext(record.id)[1].lower()
    known = (kind for start, kind in _SUFFIXES.items() if content.startswith(start))
    return next(known, suffix if suffix in SUFFIXES else ".jpg"), content
