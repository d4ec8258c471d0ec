"""Captions of images in shards by a cluster of Ray: a task a shard, a model a worker, and Ray's own retries."""

import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from itertools import islice
from typing import Any

from vlm.data.ranks import rank_by_launcher
from vlm.data.store import storage
from vlm.errors import UserError, print_error
from vlm.tasks.captioning.shard_captions import Plan, ShardCaptioner, Unreadable

RETRIES = 3  # of a shard whose worker died, beyond which it may be the shard that kills them
WAITING = 1000  # shards that Ray holds at a time
STORE = 10**8  # bytes of memory for what processes send each other, which is little

_captioners: list[ShardCaptioner] = []  # of this worker, which serves one command, a shard at a time


def caption_on_ray(plan: Plan, results: Mapping[str, str]) -> int:
    """Captions shards on the cluster of RAY_ADDRESS, or one of this machine; returns the exit status.

    Args:
        results: The name of the file of each shard.
    Raises:
        UserError: Ray is not installed or cannot be reached, or the workers cannot go on with the captions in --out.
    """
    if rank_by_launcher().world > 1:
        raise UserError("--engine ray: shares the shards itself; start one process, without torchrun or srun")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # else a cluster that is started here reports to its makers
    try:
        import ray
    except ImportError as fault:
        raise UserError('--engine ray: needs the package ray; pip install "vlm-lightning[ray]"') from fault
    done, plan = plan.done(), _anywhere(plan)
    left = [(_absolute(tar), name) for tar, name in results.items() if name not in done]
    if not left:
        ShardCaptioner(plan)  # refuses what was written with other options
        return 0
    with _cluster(ray):
        return _shared_out(ray, plan, left)


def _shared_out(ray: Any, plan: Plan, left: Sequence[tuple[str, str]]) -> int:
    """Captions shards, as many at a time as there is room for; returns the exit status."""
    gpus = 1 if plan.model.device != "cpu" and ray.cluster_resources().get("GPU") else 0
    task = ray.remote(_caption).options(num_gpus=gpus, max_retries=RETRIES, scheduling_strategy="SPREAD")
    shards, sent, running, status = iter(left), ray.put(plan), dict[Any, str](), 0
    while True:
        running |= {task.remote(sent, *shard): shard[0] for shard in islice(shards, WAITING - len(running))}
        if not running:
            return status
        (ended, *_), _ = ray.wait([*running])
        status |= _told(ray, ended, running.pop(ended))


def _told(ray: Any, ended: Any, tar: str) -> int:
    """Prints what a task returned for a shard; returns its exit status.

    Raises:
        UserError: No worker can do anything.
    """
    try:
        bad, line, errors = ray.get(ended)
    except ray.exceptions.RayTaskError:  # a fault of ours
        raise
    except ray.exceptions.RayError as fault:
        line = str(fault).strip().splitlines()[0]
        print_error(f"{tar}: failed on {RETRIES + 1} workers ({line}); run the command again")
        return 1
    if isinstance(bad, UserError):
        raise bad
    print(errors, end="", file=sys.stderr, flush=True)
    if line:
        print(line, flush=True)
    return bad


def _caption(plan: Plan, tar: str, name: str) -> tuple[int | UserError, str, str]:
    """The task: the exit status of a shard or a fault of all, a line on its file, and errors of its images."""
    errors = io.StringIO()
    with redirect_stderr(errors):
        try:
            if not _captioners:
                _captioners.append(ShardCaptioner(plan))
            bad, line = _captioners[0].caption(tar, name)
        except Unreadable as fault:
            print_error(fault)
            bad, line = 1, ""
        except UserError as fault:
            return fault, "", ""
    return bad, line, errors.getvalue()


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
    signal.signal(signal.SIGTERM, before)  # Ray's own takes its time, and may abort; what it started ends with us
    try:
        yield
    finally:
        ray.shutdown()


def _start(ray: Any, **options: Any) -> None:
    """Starts a cluster of this machine that asks nothing of other places.

    Ray's dashboard asks the metadata service of clouds where it is, whatever the settings. It meets a proxy that is
    none; workers have the user's own again.
    """
    nowhere = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "none"}  # the port of what is to be discarded
    before = {name: os.environ.get(name, "") for name in nowhere}
    os.environ.update(nowhere)
    try:
        sizes: Any = {"include_dashboard": False, "object_store_memory": STORE}
        ray.init(address="local", runtime_env={"env_vars": before}, **sizes, **options)
    finally:
        os.environ.update(before)


def _anywhere(plan: Plan) -> Plan:
    """A plan whose files have names that hold in whatever folder a worker runs."""
    model = plan.model
    checkpoint = os.path.abspath(model.checkpoint) if os.path.exists(model.checkpoint) else model.checkpoint
    output = replace(plan.output, out=_absolute(plan.out))
    return replace(plan, model=replace(model, checkpoint=checkpoint), output=output)


def _absolute(path: str) -> str:
    return path if storage.is_url(path) else os.path.abspath(path)
