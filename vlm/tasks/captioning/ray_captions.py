"""Captions images in shards on a Ray cluster: a task per shard, a model per worker, and Ray's own retries."""

import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from itertools import islice
from typing import Any

from vlm.data.store import storage
from vlm.errors import UserError, print_error
from vlm.machine import rank_by_launcher
from vlm.tasks.captioning.shard_captions import ShardCaptioner, ShardPlan, UnreadableShardError

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
    done, plan = plan.find_finished(), _with_absolute_paths(plan)
    remaining = [(_make_absolute(tar), name) for tar, name in results.items() if name not in done]
    if not remaining:
        ShardCaptioner(plan)  # refuses captions written with other options
        return 0
    with _cluster(ray):
        return _distribute(ray, plan, remaining)


def _distribute(ray: Any, plan: ShardPlan, remaining: Sequence[tuple[str, str]]) -> int:
    """Captions shards, as many at a time as the cluster runs; returns the exit status."""
    gpus = 1 if plan.model.device != "cpu" and ray.cluster_resources().get("GPU") else 0
    task = ray.remote(_caption).options(num_gpus=gpus, max_retries=RETRIES, scheduling_strategy="SPREAD")
    shards, plan_ref, running, status = iter(remaining), ray.put(plan), dict[Any, str](), 0
    while True:
        running |= {task.remote(plan_ref, *shard): shard[0] for shard in islice(shards, WAITING - len(running))}
        if not running:
            return status
        (finished, *_), _ = ray.wait([*running])
        status |= _report_result(ray, finished, running.pop(finished))


def _report_result(ray: Any, finished: Any, tar: str) -> int:
    """Prints a task's output for a shard; returns the shard's exit status.

    Raises:
        UserError: The fault concerns all shards.
    """
    try:
        status, line, errors = ray.get(finished)
    except ray.exceptions.RayTaskError:  # a bug in vlm
        raise
    except ray.exceptions.RayError as fault:
        line = str(fault).strip().splitlines()[0]
        print_error(f"{tar}: failed on {RETRIES + 1} workers ({line}); run the command again")
        return 1
    if isinstance(status, UserError):
        raise status
    print(errors, end="", file=sys.stderr, flush=True)
    if line:
        print(line, flush=True)
    return status


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
def _cluster(ray: Any) -> Iterator[None]:
    quiet: Any = {"log_to_driver": False, "logging_level": "error"}
    before = signal.getsignal(signal.SIGTERM)
    try:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(**quiet)
        else:
            _start(ray, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as fault:
        line = str(fault).strip().partition("\n")[0]
        raise UserError(f"--engine ray: no cluster can be reached or started ({line}); see RAY_ADDRESS", 1) from fault
    signal.signal(signal.SIGTERM, before)  # Ray's handler is slow and may abort; its processes end with this one
    try:
        yield
    finally:
        ray.shutdown()


def _start(ray: Any, **options: Any) -> None:
    """Starts a cluster on this machine that sends no requests to other hosts.

    Ray's dashboard queries the metadata service of clouds, whatever the settings. A proxy that does not exist blocks
    this; workers get the user's proxy settings.
    """
    dead_proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "none"}  # the discard port
    before = {name: os.environ.get(name, "") for name in dead_proxy}
    os.environ.update(dead_proxy)
    try:
        sizes: Any = {"include_dashboard": False, "object_store_memory": STORE}
        ray.init(address="local", runtime_env={"env_vars": before}, **sizes, **options)
    finally:
        os.environ.update(before)


def _with_absolute_paths(plan: ShardPlan) -> ShardPlan:
    """Returns a plan with absolute file names, which are valid in any working directory."""
    model = plan.model
    checkpoint = os.path.abspath(model.checkpoint) if os.path.exists(model.checkpoint) else model.checkpoint
    output = replace(plan.output, out=_make_absolute(plan.output_path))
    return replace(plan, model=replace(model, checkpoint=checkpoint), output=output)


def _make_absolute(path: str) -> str:
    return path if storage.is_url(path) else os.path.abspath(path)
