"""Sets of shards: found by a manifest, folders or patterns, and written with a manifest."""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypedDict

from vlm.data.images.image import SUFFIXES, ImageError
from vlm.data.records import NAMES, SPLITS, Record, Split
from vlm.data.store import storage
from vlm.data.store.shards import SUFFIX, build_index
from vlm.errors import UserError
from vlm.io.files import atomic_write
from vlm.untrusted.tars import safe_name

MANIFEST = "shards.json"
FORMAT = 1
MAX_MANIFEST = 2**28


@dataclass(frozen=True)
class Shard:
    """A tar, with its size and SHA-256 in hexadecimal if a manifest has them."""

    path: str
    size: int | None = None
    sha256: str | None = None

    def check_size(self) -> None:
        """Checks the size only, which is cheap.

        Raises:
            UserError: The file does not exist or has another size.
        """
        try:
            size = storage.get_file_size(self.path)
        except OSError as fault:
            raise UserError(f"{self.path}: cannot be read ({fault.strerror or fault}); give existing shards") from fault
        if self.size is not None and size != self.size:
            raise UserError(
                f"{self.path}: has {size:,} bytes instead of the {self.size:,} in {MANIFEST}; copy it again"
            )

    def damage(self) -> str | None:
        """Verifies the checksum, which reads the entire shard; returns a message if it fails."""
        if self.sha256 is None:
            return None
        try:
            with storage.open_file(self.path) as file:
                digest = hashlib.file_digest(file, "sha256")
        except OSError as fault:
            return f"{self.path}: cannot be read ({fault.strerror or fault})"
        return None if digest.hexdigest() == self.sha256 else f"{self.path}: does not match its checksum in {MANIFEST}"


class ShardsBySplit(NamedTuple):
    """The shards of a data set by split, or all by None if no splits are defined; and its classes if known."""

    splits: dict[str | None, list[Shard]]
    classes: list[str] | None


def find_shards(
    *, root: str, path: str | None, val_path: str | None, test_path: str | None, remote: bool
) -> ShardsBySplit:
    """Finds the shards that a config names.

    Args:
        root: Folder or URL: output of `vlm shard`, folders named like splits, or tars.
        path, val_path, test_path: Files, patterns or URLs; may be relative to the root.
        remote: Whether URLs may be read.
    Raises:
        UserError: There are no shards, or a setting is invalid.
    """
    patterns = {"train": ("data.path", path), "val": ("data.val_path", val_path), "test": ("data.test_path", test_path)}
    places = {
        name: (key, storage.strip_file_scheme(value)) for name, (key, value) in patterns.items() if value is not None
    }
    root = storage.strip_file_scheme(root)
    for key, value in [("data.root", root), *places.values()]:
        if storage.is_url(value) and not remote:
            raise UserError(
                f"{key}={value}: URLs in a checkpoint's config are off by default, because its author may be unknown\n"
                "if you trust the checkpoint, set VLM_REMOTE=1 in the environment"
            )
    try:
        if not places:
            return _find_in_folder(root)
        if "train" not in places:
            raise UserError("data.path: is not set, but data.val_path or data.test_path is; set data.path too")
        shards: dict[str | None, list[Shard]] = {}
        for name, (key, value) in places.items():
            shards[name if len(places) > 1 else None] = _expand_setting(value, key, root)
    except OSError as fault:
        raise UserError(f"data.root={root}: cannot be read ({fault.strerror or fault}); give another place") from fault
    return ShardsBySplit(shards, None)


def _expand_setting(pattern: str, key: str, root: str) -> list[Shard]:
    tried = [pattern] if storage.is_url(pattern) else [pattern, storage.join_path(root, pattern)]
    try:
        for candidate in tried:
            files = storage.expand_pattern(candidate)
            with suppress(OSError):
                if files and (candidate == tried[-1] or storage.get_file_size(files[0]) >= 0):
                    return [Shard(file) for file in files]
    except ValueError as fault:
        raise UserError(f"{key}={pattern}: {fault}; give fewer") from fault
    raise UserError(f"{key}={pattern}: no such shard, also not in {root}; set {key} to the tars")


def _find_in_folder(root: str) -> ShardsBySplit:
    try:
        return read_manifest(root)
    except FileNotFoundError:
        pass
    by_split: dict[str | None, list[Shard]] = {}
    for folder, split in SPLITS.items():
        if files := storage.list_files(storage.join_path(root, folder), ".tar"):
            by_split.setdefault(split, []).extend(Shard(file) for file in files)
    loose = storage.list_files(root, ".tar")
    if "train" not in by_split and loose:
        by_split = {None: [Shard(file) for file in loose]}
    elif "train" not in by_split:
        raise UserError(
            f"data.root={root}: has neither tars nor a folder train of tars; set data.root to the folder of the shards"
        )
    return ShardsBySplit(by_split, None)


def read_manifest(root: str) -> ShardsBySplit:
    """Reads the shards and classes from a folder's manifest; its paths must be inside the folder.

    Raises:
        FileNotFoundError: There is no manifest.
        UserError: It is invalid or incomplete.
    """
    path = storage.join_path(root, MANIFEST)
    try:
        content = json.loads(storage.read_file(path, MAX_MANIFEST))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        splits: dict[str | None, list[Shard]] = {split: [] for split in content["splits"]}
        for split, entry in [(name, entry) for name in splits for entry in content["splits"][name]]:
            name, size, digest = safe_name(entry["file"]), entry["bytes"], entry["sha256"]
            if not name or type(size) is not int or not isinstance(digest, str):
                raise ValueError(f"invalid entry {str(entry)[:80]}")
            splits[split].append(Shard(storage.join_path(root, name), size, digest))
        classes = content.get("classes")
        has_names = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
        if not splits:
            raise ValueError("incomplete")
        if not set(splits) <= set(NAMES) or "train" not in splits or not (has_names or classes is None):
            raise ValueError("invalid splits or classes")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as fault:
        raise UserError(f"{path}: is not a valid manifest of vlm shard ({fault}); write the shards again") from fault
    return ShardsBySplit(splits, classes)


class ShardEntry(TypedDict):
    """A shard in the manifest."""

    file: str
    samples: int
    bytes: int
    sha256: str


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
) -> list[ShardEntry]:
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
    entries: list[ShardEntry] = []
    waiting = iter(samples)
    first = next(waiting, None)
    while first is not None:
        path = folder / f"{len(entries):06d}.tar"
        entry, first = _write_shard(path, first, waiting, shard_size, shard_bytes)
        entries.append(entry)
    return entries


def write_manifest(folder: Path, splits: dict[str, list[ShardEntry]], classes: list[str] | None) -> None:
    """Writes the manifest, which marks the data set as complete; called last."""
    content = {"format": FORMAT, "splits": splits} | ({} if classes is None else {"classes": classes})
    with atomic_write(folder / MANIFEST) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")


def _write_shard(
    path: Path, first: tuple[str, Files], waiting: Iterator[tuple[str, Files]], shard_size: int, shard_bytes: int
) -> tuple[ShardEntry, tuple[str, Files] | None]:
    """Writes one shard; returns its entry and the first sample of the next one."""
    count = 0
    following: tuple[str, Files] | None = first
    with atomic_write(path) as file:
        digest = _Digest(file)
        while following is not None and count < shard_size and (count == 0 or digest.size < shard_bytes):
            for suffix, content in following[1]:
                member = tarfile.TarInfo(following[0] + suffix)  # without time and user: shards are reproducible
                member.size = len(content)
                padding = bytes(-len(content) % tarfile.BLOCKSIZE)
                digest.write(member.tobuf(tarfile.USTAR_FORMAT) + content + padding)
            count += 1
            following = next(waiting, None)
        digest.write(bytes(2 * tarfile.BLOCKSIZE))
    with atomic_write(f"{path}{SUFFIX}") as file:
        file.write(build_index(str(path)).to_bytes())
    file_name = f"{path.parent.name}/{path.name}"
    entry = ShardEntry(file=file_name, samples=count, bytes=digest.size, sha256=digest.sha256.hexdigest())
    return entry, following


class _Digest:
    """Writes to a file and computes its size and checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.sha256 = file, 0, hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.sha256.update(data)
        self.size += len(data)


def iter_sample_files(split: Split, unreadable: list[str]) -> Iterator[tuple[str, Files]]:
    """Yields key and files of each sample of a split; messages about unreadable images are added to `unreadable`."""
    for index, record in enumerate(split.records()):
        try:
            yield f"{index:09d}", record_files(record)
        except ImageError as fault:
            unreadable.append(str(fault))


def record_files(record: Record) -> Files:
    """The image, metadata, captions and class of a sample; raises ImageError if the image cannot be read.

    The metadata has all captions; the text file has one per line, for other programs.
    """
    metadata: dict[str, Any] = {"name": record.id}
    texts: Files = []
    if "references" in record:
        captions = record["references"]
        metadata |= {"caption": captions[0], "captions": captions}
        lines = "\n".join(" ".join(caption.splitlines()) for caption in captions)
        texts.append((".txt", lines.encode("utf-8", "replace")))
    if "label" in record:
        texts.append((".cls", str(record["label"]).encode()))
    return [image_file(record), (".json", json.dumps(metadata).encode()), *texts]


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
    suffixes = (kind for start, kind in _SUFFIXES.items() if content.startswith(start))
    return next(suffixes, suffix if suffix in SUFFIXES else ".jpg"), content
