"""Captions of images in shards: a file of JSON lines a shard, written whole or not at all.

A shard whose file is there is done, so that a kill costs one shard and the same command goes on. Processes that
torchrun or srun started share the shards by their ranks, and need not talk.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from PIL import Image

from vlm.checkpoint.base import digest
from vlm.data.images.image import ImageError, load_image
from vlm.data.ranks import Rank, rank_by_launcher
from vlm.data.store import storage
from vlm.data.store.shard_scan import open_index
from vlm.data.store.shards import Opened
from vlm.decoding.options import Decoding
from vlm.errors import UserError, print_error
from vlm.inference.options import DecodingOptions, ModelOptions
from vlm.inference.output import Kept, output_folder

# Captions images of a captioner into records, as `caption_files` does; returns the exit status.
Caption = Callable[[Any, Sequence["Member"], Kept, Decoding], int]

SUFFIX = ".jsonl"
SETTINGS = "settings.json"
MAX_SETTINGS = 2**24


class Unreadable(UserError):
    """A shard whose bytes do not come; an image in it that is damaged is another thing."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message, status)


@dataclass(frozen=True)
class Member:
    """An image in a shard, as `open_image` opens it; its text is its name."""

    shard: Opened
    at: int

    def __call__(self) -> Image.Image:
        path = f"{self.shard.path}/{self.shard.index.record(self.at).member}"
        try:
            data = storage.read_span(self.shard.path, self.shard.index.span(self.at))
        except OSError as fault:
            raise Unreadable(f"{path}: cannot be read ({fault.strerror or fault}); give the command again") from fault
        except ValueError as fault:
            raise ImageError(f"{path}: {fault}") from fault
        try:
            return load_image(data)
        except ImageError as fault:
            raise ImageError(str(fault).replace("<bytes>", path, 1)) from fault

    def __str__(self) -> str:
        return self.shard.sample(self.shard.index.record(self.at))


def caption_shards(
    tars: Sequence[str],
    model: ModelOptions,
    options: DecodingOptions,
    *,
    load: Callable[[], Any],
    caption: Caption,
    prefix: str,
) -> int:
    """Captions the images of shards; returns the exit status: 1 if a shard cannot be read, or, without ranks, an image.

    Args:
        tars: Paths, patterns or URLs.
        load: Loads the captioner.
    Raises:
        UserError: There is no place for the files, or those that are there were written with other options.
    """
    results = _results(_expanded(tars))
    if model.out is None or model.form not in ("text", "jsonl"):
        raise UserError("shards: captions are JSON lines, a file a shard; give --out DIR, and no other --format")
    out = storage.local(model.out)
    if not storage.is_url(out):
        output_folder(out)
    ours = _rank_on_its_gpu()
    captioner = load()
    search = captioner.searching(options, prefix)
    done = {os.path.basename(path) for path in _answered(out, storage.files_in, out, SUFFIX)}
    _settle(captioner, search, out, begun=bool(done))
    captioner.prepack(model.batch_size * search.columns)
    status = 0
    for tar, name in list(results.items())[ours.rank :: ours.world]:
        if name in done:
            continue
        try:
            records, members = Kept(), _members(tar)
            bad = caption(captioner, members, records, search)
            status |= bad if ours.world == 1 else 0  # by which torchrun would end the other ranks
        except Unreadable as fault:
            print_error(fault)
            status = 1
            continue
        _answered(out, storage.write_file, storage.join(out, name), b"".join(map(_line, records.kept)))
        print(f"{storage.join(out, name)}\t{len(records.kept):,} captions", flush=True)
    return status


def _members(tar: str) -> list[Member]:
    """The images of a shard.

    Raises:
        Unreadable: The shard is damaged or missing, or its place fails.
    """
    try:
        shard = Opened(tar, os.path.basename(tar), open_index(tar, write=False))
    except UserError as fault:
        raise Unreadable(str(fault)) from fault
    return [Member(shard, at) for at in range(len(shard.index))]


def _rank_on_its_gpu() -> Rank:
    """The rank of this process, which takes the GPU of its place on this machine."""
    rank = rank_by_launcher()
    if rank.world > 1 and torch.cuda.is_available():
        torch.cuda.set_device(rank.local % torch.cuda.device_count())
    return rank


def _expanded(tars: Sequence[str]) -> list[str]:
    """The shards that names, patterns and URLs stand for, in an order that all ranks share."""
    shards: dict[str, None] = {}
    for pattern in map(storage.local, tars):
        if not pattern.endswith(".tar"):
            raise UserError(f"{pattern}: is no .tar, beside others that are; give shards alone, or images alone")
        try:
            files = storage.expand(pattern)
        except (ValueError, OSError) as fault:
            raise UserError(f"{pattern}: cannot be expanded ({fault}); give other shards") from fault
        if not files:
            raise UserError(f"{pattern}: there is no such shard; give tars, or a pattern of their names")
        with suppress(OSError):
            storage.size_of(files[0])  # a store that cannot be read here at all is one line, not one a shard
        shards |= dict.fromkeys(files)
    return list(shards)


def _results(shards: Sequence[str]) -> dict[str, str]:
    """The name of the file of each shard.

    Raises:
        UserError: Two would share one.
    """
    owners: dict[str, str] = {}
    for shard in shards:
        name = os.path.basename(shard).removesuffix(".tar") + SUFFIX
        if (other := owners.setdefault(name, shard)) != shard:
            raise UserError(f"{other} and {shard} would share {name}; caption each folder into an --out of its own")
    return {shard: name for name, shard in owners.items()}


def _settle(captioner: Any, search: Decoding, out: str, *, begun: bool) -> None:
    """Notes the weights and options of the captions in a folder, all of which are written with the same.

    Args:
        begun: Whether there are captions.
    Raises:
        UserError: Those in the folder were written with others.
    """
    ours = {"weights": digest(captioner.model.state_dict()), "preprocess": captioner.preprocess.state()}
    ours = json.loads(json.dumps({**ours, "decoding": asdict(search)}))
    path = storage.join(out, SETTINGS)
    try:
        theirs = json.loads(storage.read_file(path, MAX_SETTINGS))
    except (OSError, ValueError):
        theirs = None
    if begun and theirs != ours:
        raise UserError(f"--out {out}: holds captions of another model or of other options; choose another folder")
    if theirs != ours:
        _answered(out, storage.write_file, path, json.dumps(ours, indent=1).encode() + b"\n")


def _answered(out: str, act: Any, *values: Any) -> Any:
    """The result of a call on the store of --out; its faults are the user's."""
    try:
        return act(*values)
    except OSError as fault:
        reason = fault.strerror or fault
        raise UserError(f"--out {out}: cannot be used ({reason}); free space, or choose another place", 1) from fault


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
