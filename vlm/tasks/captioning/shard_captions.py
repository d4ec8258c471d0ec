"""Captions images in shards: a file per shard, written completely or not at all."""

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vlm.checkpoint.load import digest
from vlm.data.images.image import ImageError, load_image
from vlm.data.store import storage
from vlm.data.store.shards import Opened, open_index
from vlm.decoding.options import Decoding
from vlm.errors import UserError, print_error
from vlm.inference.options import ModelOptions, OutputOptions
from vlm.inference.use import Use
from vlm.io.files import remove_unfinished, require_pyarrow
from vlm.io.output import output_folder
from vlm.machine import Rank, rank_by_launcher

FORMS = ("jsonl", "parquet")


def chosen_form(form: str) -> str:
    """Returns the form for --format, by default JSON lines.

    Raises:
        UserError: It does not exist for shards, or its package is not installed.
    """
    if form not in ("text", *FORMS):
        raise UserError(f"--format {form}: does not go with shards; choose jsonl or parquet")
    if form == "parquet":
        require_pyarrow("--format parquet")
    return "jsonl" if form == "text" else form


def encoded(form: str, records: Sequence[Mapping[str, Any]], *, ranked: bool) -> bytes:
    """Encodes records as the content of a file.

    Args:
        ranked: Whether an image has several captions, each with a rank.
    """
    if form == "jsonl":
        return b"".join(map(_line, records))
    import pyarrow
    from pyarrow.parquet import write_table

    columns = [("image", pyarrow.string()), *([("rank", pyarrow.int32())] if ranked else [])]
    columns += [("caption", pyarrow.string()), ("logprob", pyarrow.float64()), ("confidence", pyarrow.float64())]
    rows = [{**record, "image": _unicode(record["image"])} for record in records]
    file = io.BytesIO()
    write_table(pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(columns)), file)
    return file.getvalue()


def _line(record: Mapping[str, Any]) -> bytes:
    return _unicode(json.dumps(record, ensure_ascii=False)).encode() + b"\n"


def _unicode(text: str) -> str:
    """Escapes bytes that are not UTF-8, which file names may contain."""
    return text.encode("utf-8", "backslashreplace").decode()


SETTINGS = "settings.json"
MAX_SETTINGS = 2**24


class Unreadable(UserError):
    """A shard cannot be read; damaged images in it do not count."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message, status)


@dataclass(frozen=True)
class Member:
    """An image in a shard, for `open_image`; str() gives its name."""

    shard: Opened
    at: int

    def __call__(self) -> Image.Image:
        path = f"{self.shard.path}/{self.shard.index.record(self.at).member}"
        try:
            data = storage.read_span(self.shard.path, self.shard.index.span(self.at))
        except OSError as fault:
            raise Unreadable(f"{path}: cannot be read ({fault.strerror or fault}); run the command again") from fault
        except ValueError as fault:
            raise ImageError(f"{path}: {fault}") from fault
        return load_image(data, path)

    def __str__(self) -> str:
        return self.shard.sample(self.shard.index.record(self.at))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options for captioning shards; can be sent to another process.

    Args:
        kind: The class of the captioner.
    """

    model: ModelOptions
    output: OutputOptions
    options: Any
    kind: Callable[..., Any]

    @property
    def out(self) -> str:
        return str(self.output.out)

    @property
    def suffix(self) -> str:
        return f".{self.output.form}"

    def done(self) -> set[str]:
        """Returns the names of the files that exist."""
        return {os.path.basename(path) for path in _answered(self.out, storage.files_in, self.out, self.suffix)}


class ShardCaptioner:
    """A loaded captioner, after a check that it may continue the captions in --out.

    Raises:
        UserError: They were written with other weights or options.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.captioner = plan, plan.model.load(plan.kind)
        search = self.captioner.searching(plan.options)
        _settle(self.captioner, search, plan.out, begun=bool(plan.done()))
        self.captioner.prepack(plan.options.batch_size * search.columns)

    def caption(self, tar: str, name: str) -> tuple[int, str]:
        """Writes the file of a shard; returns 1 if an image cannot be read, and a line for the user.

        Raises:
            Unreadable: The shard cannot be read; no file is written.
        """
        plan, rows, bad = self.plan, list[Mapping[str, Any]](), 0
        for outcome in Use(self.captioner, _members(tar), plan.options).outcomes():
            if isinstance(outcome.result, Unreadable):
                raise outcome.result
            if isinstance(outcome.result, UserError):
                print_error(outcome.result)
                bad = 1
            else:
                rows += self.captioner.record(outcome.source, outcome.result, plan.options)
        data = encoded(plan.output.form, rows, ranked=plan.options.results > 1)
        path = storage.join(plan.out, name)
        if not storage.is_url(plan.out):
            _answered(plan.out, remove_unfinished, Path(plan.out), name)  # left by a killed process
        _answered(plan.out, storage.write_file, path, data)
        return bad, f"{path}\t{len(rows):,} captions"


def caption_shards(tars: Sequence[str], plan: Plan, *, engine: Callable[[Plan, Mapping[str, str]], int]) -> int:
    """Captions the images of shards; returns 1 if a shard, or in a single process an image, cannot be read.

    Args:
        tars: Paths, patterns or URLs.
        engine: Captions shards, given the name of each one's file: `caption_by_rank`, or a cluster.
    Raises:
        UserError: --out is missing, or its files were written with other options.
    """
    form = chosen_form(plan.output.form)
    results = _results(_expanded(tars), f".{form}")
    if plan.output.out is None:
        raise UserError("shards: captions are written into a file a shard; give --out DIR")
    out = storage.local(plan.output.out)
    if not storage.is_url(out):
        output_folder(out)
    return engine(replace(plan, output=OutputOptions(out=out, form=form)), results)


def caption_by_rank(plan: Plan, results: Mapping[str, str]) -> int:
    """Captions the shards of this process's rank."""
    ours, status = _rank_on_its_gpu(), 0
    done, captioner = plan.done(), ShardCaptioner(plan)
    for tar, name in list(results.items())[ours.rank :: ours.world]:
        if name in done:
            continue
        try:
            bad, line = captioner.caption(tar, name)
        except Unreadable as fault:
            print_error(fault)
            status = 1
            continue
        status |= bad if ours.world == 1 else 0  # at which torchrun would end the other ranks
        print(line, flush=True)
    return status


def _members(tar: str) -> list[Member]:
    """Returns the images of a shard.

    Raises:
        Unreadable: The shard is damaged or missing, or its storage fails.
    """
    try:
        shard = Opened(tar, os.path.basename(tar), open_index(tar, write=False))
    except UserError as fault:
        raise Unreadable(str(fault)) from fault
    return [Member(shard, at) for at in range(len(shard.index))]


def _rank_on_its_gpu() -> Rank:
    """Returns the rank of this process, and selects the GPU of its local rank."""
    rank = rank_by_launcher()
    if rank.world > 1 and torch.cuda.is_available():
        torch.cuda.set_device(rank.local % torch.cuda.device_count())
    return rank


def _expanded(tars: Sequence[str]) -> list[str]:
    """Expands names, patterns and URLs to shards, in the same order on all ranks."""
    shards: dict[str, None] = {}
    for pattern in map(storage.local, tars):
        if not pattern.endswith(".tar"):
            raise UserError(f"{pattern}: is not a .tar, but others are; give shards alone, or images alone")
        try:
            files = storage.expand(pattern)
        except (ValueError, OSError) as fault:
            raise UserError(f"{pattern}: cannot be expanded ({fault}); give other shards") from fault
        if not files:
            raise UserError(f"{pattern}: there is no such shard; give tars, or a pattern of their names")
        with suppress(OSError):
            storage.size_of(files[0])  # else an unreachable store gives an error per shard
        shards |= dict.fromkeys(files)
    return list(shards)


def _results(shards: Sequence[str], suffix: str) -> dict[str, str]:
    """Returns the file name of each shard's captions.

    Raises:
        UserError: Two shards would share one.
    """
    owners: dict[str, str] = {}
    for shard in shards:
        name = os.path.basename(shard).removesuffix(".tar") + suffix
        if (other := owners.setdefault(name, shard)) != shard:
            raise UserError(f"{other} and {shard} would share {name}; caption each folder into an --out of its own")
    return {shard: name for name, shard in owners.items()}


def _settle(captioner: Any, search: Decoding, out: str, *, begun: bool) -> None:
    """Records the weights and options of a folder of captions, or checks that they are the same.

    Args:
        begun: Whether captions exist already.
    Raises:
        UserError: The folder's captions were written with others.
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
    """Calls the store of --out; converts its errors to a UserError."""
    try:
        return act(*values)
    except OSError as fault:
        reason = fault.strerror or fault
        raise UserError(f"--out {out}: cannot be used ({reason}); free space, or choose another place", 1) from fault
