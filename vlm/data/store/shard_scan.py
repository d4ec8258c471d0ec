"""Opens the index of a shard, or creates it from the contents of the tar."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

from vlm.data.images.image import SUFFIXES
from vlm.data.store import storage
from vlm.data.store.shard_index import MAX_INDEX, LeftOut, ShardIndex, ShardRecord, make_index, parse_index
from vlm.data.store.tar import Span, TarError, members
from vlm.data.text.lines import one_line
from vlm.errors import UserError
from vlm.io.atomic import atomic_write

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
        size = storage.size_of(path)
        with suppress(OSError, ValueError, TypeError, RecursionError):
            if not _older(path + SUFFIX, path):
                return parse_index(storage.read_file(path + SUFFIX, MAX_INDEX), size)
        index = build_index(path)
    except (OSError, TarError) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise UserError(f"{path}: cannot be read as a tar ({reason}); give a complete, uncompressed one") from (fault)
    if write and not storage.is_url(path):
        with suppress(OSError), atomic_write(path + SUFFIX) as file:  # optional: otherwise it is created each time
            file.write(index.to_bytes())
    return index


def _older(index: str, path: str) -> bool:
    """Returns True if the index of a local tar is older than the tar."""
    return not storage.is_url(path) and os.stat(index).st_mtime_ns < os.stat(path).st_mtime_ns


def build_index(path: str) -> ShardIndex:
    """Creates the index of a shard from its headers and texts, without reading images.

    Raises:
        TarError: It is not a tar, or incomplete or damaged.
        OSError: It cannot be read.
    """
    samples: dict[str, _Parts] = {}
    left_out: list[LeftOut] = []
    with storage.open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        for name, span in members(file):
            if span is not None:
                _take(samples, name.encode("utf-8", "backslashreplace").decode(), span, file, left_out)
    samples_read = [_sample(key, parts, left_out) for key, parts in samples.items()]
    return make_index([one for one in samples_read if one is not None], left_out, size)


class _Parts(NamedTuple):
    """The parts of a sample in a tar: position of the image by path, and texts by type."""

    images: dict[str, Span]
    texts: dict[str, str | None]


def _take(samples: dict[str, _Parts], name: str, span: Span, file: BinaryIO, left_out: list[LeftOut]) -> None:
    """Adds a member to its sample, with its content if it is a text."""
    folder, slash, base = name.rpartition("/")
    stem, _, kind = base.partition(".")
    kind = kind.lower()
    is_image = f".{kind}" in SUFFIXES
    if not stem or not (is_image or kind in TEXTS):
        if os.path.splitext(base)[1].lower() in SUFFIXES and stem:
            left_out.append(LeftOut("", f"{name}: is ignored, because its name has two dots"))
        return
    parts = samples.setdefault(folder + slash + stem, _Parts({}, {}))
    if parts.images if is_image else kind in parts.texts:
        left_out.append(LeftOut("", f"{name}: its sample already has one"))
    elif is_image:
        parts.images[name] = span
    else:
        parts.texts[kind] = _text(name, span, file, left_out)


def _sample(key: str, parts: _Parts, left_out: list[LeftOut]) -> tuple[Span, ShardRecord] | None:
    if not parts.images:
        left_out.append(LeftOut("no image", f"{key}: has no image"))
        return None
    ((member, span),) = parts.images.items()
    about = _json(key, parts.texts["json"], left_out) if parts.texts.get("json") is not None else {}
    name, label = about.get("name"), parts.texts.get("cls")
    captions = list(_captions(member, about, parts.texts.get("txt"), left_out))
    known = _clean(name) if isinstance(name, str) and name else None
    return span, ShardRecord(member, known, label.strip() if label else None, captions)


def _text(name: str, span: Span, file: BinaryIO, left_out: list[LeftOut]) -> str | None:
    if span.size > MAX_TEXT:
        left_out.append(LeftOut("", f"{name}: has {span.size:,} bytes; at most {MAX_TEXT:,} are allowed"))
        return None
    file.seek(span.offset)
    try:
        return file.read(span.size).decode("utf-8-sig")
    except UnicodeDecodeError:
        left_out.append(LeftOut("", f"{name}: is not UTF-8"))
        return None


def _json(key: str, text: str | None, left_out: list[LeftOut]) -> dict[str, Any]:
    try:
        about = json.loads(text or "")
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        left_out.append(LeftOut("", f"{key}.json: is not a JSON object"))
        return {}
    return about


def _clean(text: str) -> str:
    """Replaces halves of surrogate pairs, which JSON may contain but UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _captions(member: str, about: dict[str, Any], lines: str | None, left_out: list[LeftOut]) -> Iterator[str]:
    """The captions of the metadata (a list or a single one), or the lines of the text if these are empty or null."""
    captions = next((about[key] for key in ("captions", "caption") if about.get(key)), None)
    if captions is None:
        captions = lines.rstrip().split("\n") if lines else []
    seen = set()
    for caption in captions if isinstance(captions, list) else [captions]:
        text = one_line(_clean(caption)) if isinstance(caption, str) else ""
        if not text:
            left_out.append(LeftOut("empty caption", f"{member}: no caption"))
        elif text in seen:
            left_out.append(LeftOut("repeated", f"{member}: repeats a caption: {text}"))
        else:
            seen.add(text)
            yield text
