"""Captions images in shards, a file per shard, written completely or not at all; by ranks, or on a Ray cluster."""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image

from vlm.checkpoint.load import digest
from vlm.data.images.image import ImageError, load_image
from vlm.data.store import storage
from vlm.data.store.shards import IndexedShard, open_index
from vlm.decoding.options import Decoding
from vlm.errors import UserError, print_error
from vlm.inference.command_options import CaptionOptions
from vlm.inference.options import ModelOptions, OutputOptions
from vlm.inference.use import PredictionRunner
from vlm.io.files import remove_unfinished, require_pyarrow
from vlm.io.output import output_folder
from vlm.machine import rank_by_launcher
from vlm.tasks.captioning.predict import Captioner


def encode_records(form: str, records: Sequence[Mapping[str, Any]], *, ranked: bool) -> bytes:
    """Encodes records as the content of a file.

    Args:
        ranked: Whether an image has several captions, each with a rank.
    """
    if form == "jsonl":
        lines = (json.dumps(record, ensure_ascii=False) for record in records)
        return b"".join(_escape_undecodable(line).encode() + b"\n" for line in lines)
    import pyarrow
    from pyarrow.parquet import write_table

    columns = [("image", pyarrow.string()), *([("rank", pyarrow.int32())] if ranked else [])]
    columns += [("caption", pyarrow.string()), ("logprob", pyarrow.float64()), ("confidence", pyarrow.float64())]
    rows = [{**record, "image": _escape_undecodable(record["image"])} for record in records]
    file = io.BytesIO()
    write_table(pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(columns)), file)
    return file.getvalue()


def _escape_undecodable(text: str) -> str:
    """Escapes bytes that are not UTF-8, which file names may contain."""
    return text.encode("utf-8", "backslashreplace").decode()


SETTINGS = "settings.json"
MAX_SETTINGS = 2**24


class UnreadableShardError(UserError):
    """A shard cannot be read; damaged images in it do not count."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message, status)


@dataclass(frozen=True)
class Member:
    """An image in a shard, for `open_image`; str() gives its name."""

    shard: IndexedShard
    at: int

    def __call__(self) -> Image.Image:
        path = f"{self.shard.path}/{self.shard.index.record(self.at).member}"
        try:
            data = storage.read_span(self.shard.path, self.shard.index.span(self.at))
        except OSError as fault:
            reason = fault.strerror or fault
            raise UnreadableShardError(f"{path}: cannot be read ({reason}); run the command again") from fault
        except ValueError as fault:
            raise ImageError(f"{path}: {fault}") from fault
        return load_image(data, path)

    def __str__(self) -> str:
        return self.shard.sample(self.shard.index.record(self.at))


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The options for captioning shards; can be sent to another process."""

    model: ModelOptions
    output: OutputOptions
    options: CaptionOptions

    @property
    def output_path(self) -> str:
        return str(self.output.out)

    def find_finished(self) -> set[str]:
        """Returns the names of the files that exist."""
        with _storage_errors(self.output_path):
            return set(map(os.path.basename, storage.list_files(self.output_path, f".{self.output.form}")))


class ShardCaptioner:
    """A loaded captioner, after a check that it may continue the captions in --out.

    Raises:
        UserError: They were written with other weights or options.
    """

    def __init__(self, plan: ShardPlan) -> None:
        self.plan, self.captioner = plan, plan.model.load(Captioner)
        search = self.captioner.build_decoding(plan.options)
        _check_settings(self.captioner, search, plan.output_path, has_captions=bool(plan.find_finished()))
        self.captioner.prepack(plan.options.batch_size * search.columns)

    def caption(self, tar: str, name: str) -> tuple[int, str]:
        """Writes the file of a shard; returns 1 if an image cannot be read, and a line for the user.

        Raises:
            UnreadableShardError: The shard is damaged or missing, or its storage fails; no file is written.
        """
        plan, rows, status = self.plan, list[Mapping[str, Any]](), 0
        try:
            shard = IndexedShard(tar, os.path.basename(tar), open_index(tar, write=False))
        except UserError as fault:
            raise UnreadableShardError(str(fault)) from fault
        members = [Member(shard, at) for at in range(len(shard.index))]
        for outcome in PredictionRunner(self.captioner, members, plan.options).outcomes():
            if isinstance(outcome.result, UnreadableShardError):
                raise outcome.result
            if isinstance(outcome.result, UserError):
                print_error(outcome.result)
                status = 1
            else:
                rows += self.captioner.record(outcome.source, outcome.result, plan.options)
        data = encode_records(plan.output.form, rows, ranked=plan.options.results > 1)
        path = storage.join_path(plan.output_path, name)
        with _storage_errors(plan.output_path):
            if not storage.is_url(plan.output_path):
                remove_unfinished(Path(plan.output_path), name)  # left by a killed process
            storage.write_file(path, data)
        return status, f"{path}\t{len(rows):,} captions"


def caption_shards(
    tars: Sequence[str], plan: ShardPlan, *, engine: Callable[[ShardPlan, Mapping[str, str]], int]
) -> int:
    """Captions the images of shards; returns 1 if a shard, or in a single process an image, cannot be read.

    Args:
        tars: Paths, patterns or URLs.
        engine: Captions shards, given the name of each one's file: `caption_by_rank`, or a cluster.
    Raises:
        UserError: --format is not supported or its package not installed, two shards would share a file, --out is
            missing, or its files were written with other options.
    """
    form = plan.output.form
    if form not in ("text", "jsonl", "parquet"):
        raise UserError(f"--format {form}: not supported for shards; choose jsonl or parquet")
    if form == "parquet":
        require_pyarrow("--format parquet")
    form, owners = "jsonl" if form == "text" else form, dict[str, str]()
    for shard in _expand_shards(tars):
        name = f"{os.path.basename(shard).removesuffix('.tar')}.{form}"
        if (owner := owners.setdefault(name, shard)) != shard:
            raise UserError(f"{owner} and {shard} would share {name}; use a separate --out for each folder")
    if plan.output.out is None:
        raise UserError("shards: one file of captions is written per shard; give --out DIR")
    out = storage.strip_file_scheme(plan.output.out)
    if not storage.is_url(out):
        output_folder(out)
    results = {shard: name for name, shard in owners.items()}
    return engine(replace(plan, output=OutputOptions(out=out, form=form)), results)


def caption_by_rank(plan: ShardPlan, results: Mapping[str, str]) -> int:
    """Captions the shards of this process's rank, on the GPU of its local rank."""
    rank, status = rank_by_launcher(), 0
    if rank.world > 1 and torch.cuda.is_available():
        torch.cuda.set_device(rank.local % torch.cuda.device_count())
    done, captioner = plan.find_finished(), ShardCaptioner(plan)
    for tar, name in list(results.items())[rank.rank :: rank.world]:
        if name in done:
            continue
        try:
            bad, line = captioner.caption(tar, name)
        except UnreadableShardError as fault:
            print_error(fault)
            status = 1
            continue
        status |= bad if rank.world == 1 else 0  # at which torchrun would end the other ranks
        print(line, flush=True)
    return status


def _expand_shards(tars: Sequence[str]) -> list[str]:
    """Expands names, patterns and URLs to shards, in the same order on all ranks."""
    shards: dict[str, None] = {}
    for pattern in map(storage.strip_file_scheme, tars):
        if not pattern.endswith(".tar"):
            raise UserError(f"{pattern}: is not a .tar file, but other inputs are; give only shards or only images")
        try:
            files = storage.expand_pattern(pattern)
        except (ValueError, OSError) as fault:
            raise UserError(f"{pattern}: cannot be expanded ({fault}); give other shards") from fault
        if not files:
            raise UserError(f"{pattern}: there is no such shard; give tars, or a pattern of their names")
        with suppress(OSError):
            storage.get_file_size(files[0])  # else an unreachable store gives an error per shard
        shards |= dict.fromkeys(files)
    return list(shards)


def _check_settings(captioner: Captioner, search: Decoding, out: str, *, has_captions: bool) -> None:
    """Records the weights and options of a folder of captions, or checks that they are the same.

    Args:
        has_captions: Whether captions exist already.
    Raises:
        UserError: The folder holds captions of another model or of other options.
    """
    settings = {"weights": digest(captioner.model.state_dict()), "preprocess": captioner.preprocess.state()}
    settings = json.loads(json.dumps({**settings, "decoding": asdict(search)}))
    path = storage.join_path(out, SETTINGS)
    try:
        stored = json.loads(storage.read_file(path, MAX_SETTINGS))
    except (OSError, ValueError):
        stored = None
    if has_captions and stored != settings:
        raise UserError(f"--out {out}: holds captions of another model or of other options; choose another folder")
    if stored != settings:
        with _storage_errors(out):
            storage.write_file(path, json.dumps(settings, indent=1).encode() + b"\n")


@contextmanager
def _storage_errors(out: str) -> Iterator[None]:
    """Converts errors of the store of --out to a UserError."""
    try:
        yield
    except OSError as fault:
        reason = fault.strerror or fault
        raise UserError(f"--out {out}: cannot be used ({reason}); free space, or choose another place", 1) from fault


RETRIES = 3  # retries of a shard whose worker died; after these the shard itself may be the cause
WAITING = 1000  # most shards submitted to Ray at a time
STORE = 10**8  # bytes of Ray's object store; processes exchange little data

_captioners: list[ShardCaptioner] = []  # the captioner of this worker, which serves one command, one shard at a time


def caption_on_ray(plan: ShardPlan, results: Mapping[str, str]) -> int:
    """Captions shards on the cluster of RAY_ADDRESS, or one of this machine; returns the exit status.

    Args:
        results: The file name of each shard's captions.
    Raises:
        UserError: Ray is not installed or cannot be reached, or the captions in --out cannot be continued.
    """
    if rank_by_launcher().world > 1:
        raise UserError("--engine ray: Ray distributes the shards itself; start one process, without torchrun or srun")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # else a cluster started here sends usage reports
    try:
        import ray
    except ImportError as fault:
        raise UserError('--engine ray: needs the package ray; pip install "vlm-lightning[ray]"') from fault
    done, model = plan.find_finished(), plan.model  # workers have other working directories
    checkpoint = os.path.abspath(model.checkpoint) if os.path.exists(model.checkpoint) else model.checkpoint
    output = replace(plan.output, out=_make_absolute(plan.output_path))
    plan = replace(plan, model=replace(model, checkpoint=checkpoint), output=output)
    remaining = [(_make_absolute(tar), name) for tar, name in results.items() if name not in done]
    if not remaining:
        ShardCaptioner(plan)  # refuses captions written with other options
        return 0
    with _cluster(ray):
        return _distribute(ray, plan, remaining)


def _distribute(ray: ModuleType, plan: ShardPlan, remaining: Sequence[tuple[str, str]]) -> int:
    """Captions shards, as many at a time as the cluster runs, and prints their outputs; returns the exit status.

    Raises:
        UserError: A fault concerns all shards.
    """
    gpus = 1 if plan.model.device != "cpu" and ray.cluster_resources().get("GPU") else 0
    task = ray.remote(_caption).options(num_gpus=gpus, max_retries=RETRIES, scheduling_strategy="SPREAD")
    shards, plan_ref, running, status = iter(remaining), ray.put(plan), dict[Any, str](), 0
    while True:
        running |= {task.remote(plan_ref, *shard): shard[0] for shard in islice(shards, WAITING - len(running))}
        if not running:
            return status
        (finished, *_), _ = ray.wait([*running])
        tar = running.pop(finished)
        try:
            shard_status, line, errors = ray.get(finished)
        except ray.exceptions.RayTaskError:  # a bug in vlm
            raise
        except ray.exceptions.RayError as fault:
            line = str(fault).strip().splitlines()[0]
            print_error(f"{tar}: failed on {RETRIES + 1} workers ({line}); run the command again")
            status |= 1
            continue
        if isinstance(shard_status, UserError):
            raise shard_status
        print(errors, end="", file=sys.stderr, flush=True)
        if line:
            print(line, flush=True)
        status |= shard_status


def _caption(plan: ShardPlan, tar: str, name: str) -> tuple[int | UserError, str, str]:
    """The Ray task: returns a shard's exit status or a fault of all shards, a line on its file, and image errors."""
    errors = io.StringIO()
    with redirect_stderr(errors):
        try:
            if not _captioners:
                _captioners.append(ShardCaptioner(plan))
            status, line = _captioners[0].caption(tar, name)
        except UnreadableShardError as fault:
            print_error(fault)
            status, line = 1, ""
        except UserError as fault:
            return fault, "", ""
    return status, line, errors.getvalue()


@contextmanager
def _cluster(ray: ModuleType) -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(log_to_driver=False, logging_level="error")
        else:
            _start(ray)
    except (ConnectionError, RuntimeError, ValueError) as fault:
        line = str(fault).strip().partition("\n")[0]
        raise UserError(f"--engine ray: no cluster can be reached or started ({line}); see RAY_ADDRESS", 1) from fault
    signal.signal(signal.SIGTERM, before)  # Ray's handler is slow and may abort; its processes end with this one
    try:
        yield
    finally:
        ray.shutdown()


def _start(ray: ModuleType) -> None:
    """Starts a cluster on this machine that sends no requests to other hosts.

    Ray's dashboard queries the metadata service of clouds, whatever the settings. A proxy that does not exist blocks
    this; workers get the user's proxy settings.
    """
    dead_proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "none"}  # the discard port
    before = {name: os.environ.get(name, "") for name in dead_proxy}
    os.environ.update(dead_proxy)
    try:
        ray.init(
            address="local",
            runtime_env={"env_vars": before},
            include_dashboard=False,
            object_store_memory=STORE,
            log_to_driver=False,
            logging_level="error",
        )
    finally:
        os.environ.update(before)


def _make_absolute(path: str) -> str:
    return path if storage.is_url(path) else os.path.abspath(path)
