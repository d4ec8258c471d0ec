"""Coordination of a run's processes before torch.distributed is initialized: rank zero decides for all."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from vlm.errors import UserError
from vlm.machine import TORCHELASTIC, rank_by_launcher

if TYPE_CHECKING:
    from torch.distributed import Store

CHOICE_VARIABLE = "VLM_RUN"  # environment variable that passes rank zero's choice to the processes that it starts
START_TIMEOUT = timedelta(minutes=10)  # processes of one run may start far apart on a busy cluster

_stores: list["Store"] = []  # kept alive, because rank zero serves them to the other ranks


def find_launched_rank() -> tuple[int, int] | None:
    """Returns (rank, number of processes) if torchrun or srun started several processes; else None."""
    launched = rank_by_launcher(TORCHELASTIC)
    return (launched.rank, launched.world) if launched.world > 1 else None


def is_rank_zero() -> bool:
    """Returns True in the process that decides and writes."""
    launched = find_launched_rank()
    if launched:
        return launched[0] == 0
    return os.environ.get("LOCAL_RANK", "0") == "0" or CHOICE_VARIABLE not in os.environ


def broadcast_choice(choose: Callable[[], str]) -> str:
    """Returns the choice of rank zero in every process of the run.

    Args:
        choose: Makes the choice; called in rank zero only.
    Raises:
        UserError: The choice failed; raised in all processes.
    """
    launched = find_launched_rank()
    if launched:
        return _broadcast_by_store(choose, *launched)
    if is_rank_zero():
        os.environ[CHOICE_VARIABLE] = choose()
    return os.environ[CHOICE_VARIABLE]


def _broadcast_by_store(choose: Callable[[], str], rank: int, world: int) -> str:
    store = _open_store(rank, world)
    name = f"vlm choice {len(_stores)}"
    if rank > 0:
        chosen = store.get(name).decode()
        store.add(f"{name} read", 1)
        if chosen.startswith("!"):
            raise UserError(chosen[1:])
        return chosen
    try:
        chosen = choose()
        store.set(name, chosen)
    except UserError as fault:
        store.set(name, f"!{fault}")
        store.wait([f"{name} read"], START_TIMEOUT)
        raise
    return chosen


@contextmanager
def rank_zero_first(timeout: timedelta = START_TIMEOUT) -> Iterator[None]:
    """Context that rank zero runs before the other ranks, which then read what it wrote.

    Lightning starts its processes after rank zero has left the context, so that they need not wait.

    Args:
        timeout: Maximum time that the other ranks wait.
    """
    launched = find_launched_rank()
    if not launched:
        yield
        return
    rank, world = launched
    store = _open_store(rank, world)
    name = f"vlm turn {len(_stores)}"
    if rank > 0:
        store.wait([name], timeout)
    try:
        yield
    finally:
        if rank == 0:
            store.set(name, "done")


def _open_store(rank: int, world: int) -> "Store":
    """Returns a key-value store that all processes reach, at the address of the later process group."""
    import torch
    from lightning.fabric.plugins.environments import SLURMEnvironment

    if TORCHELASTIC not in os.environ:
        slurm = SLURMEnvironment(auto_requeue=False)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = slurm.main_address, str(slurm.main_port)
    store, *_ = next(torch.distributed.rendezvous("env://", rank, world, timeout=START_TIMEOUT))
    _stores.append(store)
    return store


def check_devices(batch_size: int, samples: int, world_size: int) -> None:
    """Checks that the trainer matches the started processes, and that these can share the samples.

    Args:
        batch_size: Samples of the global batch.
        samples: Samples of an epoch.
        world_size: Number of processes that the trainer expects.
    Raises:
        UserError: The number of processes differs, or there are too few samples or they are not divisible.
    """
    launched = find_launched_rank()
    if launched and launched[1] != world_size:
        raise UserError(
            f"trainer.devices: {launched[1]} processes were started, but the trainer expects {world_size}; "
            "set trainer=ddp and trainer.devices=N, the number of processes per machine"
        )
    if samples < world_size:
        raise UserError(f"data: {samples} training samples are too few for {world_size} devices; add samples")
    if faults := batch_faults(batch_size, world_size):
        raise UserError(faults[0])


def batch_faults(batch_size: int, devices: int) -> list[str]:
    """Returns an error if devices cannot share a batch equally; none for an unknown number of devices, 0 or less."""
    if devices <= 0 or batch_size % devices == 0:
        return []
    return [f"data.batch_size: {batch_size} is not divisible by {devices} devices; set a multiple"]
