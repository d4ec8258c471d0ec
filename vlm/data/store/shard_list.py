"""Finds a data set's shards, from a manifest, folders or patterns."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from vlm.data.records import NAMES, SPLITS
from vlm.data.store import storage
from vlm.data.store.tar import safe_name
from vlm.errors import UserError

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
            size = storage.size_of(self.path)
        except OSError as fault:
            raise UserError(f"{self.path}: cannot be read ({fault.strerror or fault}); give existing shards") from fault
        if self.size is not None and size != self.size:
            raise UserError(
                f"{self.path}: has {size:,} bytes instead of the {self.size:,} in {MANIFEST}; copy it again"
            )

    def damage(self) -> str | None:
        """Verifies the checksum, which reads the whole shard; returns a message if it fails."""
        if self.sha256 is None:
            return None
        try:
            with storage.open_file(self.path) as file:
                digest = hashlib.file_digest(file, "sha256")
        except OSError as fault:
            return f"{self.path}: cannot be read ({fault.strerror or fault})"
        return None if digest.hexdigest() == self.sha256 else f"{self.path}: does not match its checksum in {MANIFEST}"


class Found(NamedTuple):
    """The shards of a data set by split, or all by None if no splits are defined; and its classes if known."""

    splits: dict[str | None, list[Shard]]
    classes: list[str] | None


def find_shards(*, root: str, path: str | None, val_path: str | None, test_path: str | None, remote: bool) -> Found:
    """Finds the shards that a config names.

    Args:
        root: Folder or URL: output of `vlm shard`, folders named like splits, or tars.
        path, val_path, test_path: Files, patterns or URLs; may be relative to the root.
        remote: Whether URLs may be read.
    Raises:
        UserError: There are no shards, or a setting is invalid.
    """
    patterns = {"train": ("data.path", path), "val": ("data.val_path", val_path), "test": ("data.test_path", test_path)}
    places = {name: (key, storage.local(value)) for name, (key, value) in patterns.items() if value is not None}
    root = storage.local(root)
    for key, value in [("data.root", root), *places.values()]:
        storage.check_place(value, key, urls=remote)
    try:
        if not places:
            return _in_folder(root)
        if "train" not in places:
            raise UserError("data.path: not given, but data.val_path or data.test_path is; give data.path too")
        shards: dict[str | None, list[Shard]] = {}
        for name, (key, value) in places.items():
            shards[name if len(places) > 1 else None] = _expanded(value, key, root)
    except OSError as fault:
        raise UserError(f"data.root={root}: cannot be read ({fault.strerror or fault}); give another place") from fault
    return Found(shards, None)


def _expanded(pattern: str, key: str, root: str) -> list[Shard]:
    tried = [pattern] if storage.is_url(pattern) else [pattern, storage.join(root, pattern)]
    try:
        for candidate in tried:
            files = storage.expand(candidate)
            if files and (candidate == tried[-1] or _is_there(files[0])):
                return [Shard(file) for file in files]
    except ValueError as fault:
        raise UserError(f"{key}={pattern}: {fault}; give fewer") from fault
    raise UserError(f"{key}={pattern}: no such shard, also not in {root}; set {key} to the tars")


def _is_there(path: str) -> bool:
    try:
        return storage.size_of(path) >= 0
    except OSError:
        return False


def _in_folder(root: str) -> Found:
    try:
        return read_manifest(root)
    except FileNotFoundError:
        pass
    by_split: dict[str | None, list[Shard]] = {}
    for folder, split in SPLITS.items():
        if files := storage.files_in(storage.join(root, folder), ".tar"):
            by_split.setdefault(split, []).extend(Shard(file) for file in files)
    loose = storage.files_in(root, ".tar")
    if "train" not in by_split and loose:
        by_split = {None: [Shard(file) for file in loose]}
    elif "train" not in by_split:
        raise UserError(
            f"data.root={root}: has neither tars nor a folder train of tars; set data.root to the folder of the shards"
        )
    return Found(by_split, None)


def read_manifest(root: str) -> Found:
    """Reads the shards and classes from a folder's manifest; its paths must be inside the folder.

    Raises:
        FileNotFoundError: There is no manifest.
        UserError: It is invalid or incomplete.
    """
    path = storage.join(root, MANIFEST)
    try:
        content = json.loads(storage.read_file(path, MAX_MANIFEST))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        splits = {name: [_listed(root, entry) for entry in content["splits"][name]] for name in content["splits"]}
        classes = content.get("classes")
        known = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
        if not splits:
            raise ValueError("incomplete")
        if not set(splits) <= set(NAMES) or "train" not in splits or not (known or classes is None):
            raise ValueError("invalid splits or classes")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as fault:
        raise UserError(f"{path}: is no valid manifest of vlm shard ({fault}); write the shards again") from fault
    return Found({**splits}, classes)


def _listed(root: str, entry: dict[str, Any]) -> Shard:
    name, size, digest = safe_name(entry["file"]), entry["bytes"], entry["sha256"]
    if not name or type(size) is not int or not isinstance(digest, str):
        raise ValueError(f"invalid entry {str(entry)[:80]}")
    return Shard(storage.join(root, name), size, digest)
