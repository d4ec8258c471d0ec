"""The processes of one run: rank zero decides, and all do the same."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from vlm.errors import UserError
from vlm.machine import TORCHELASTIC, rank_by_launcher

CHOICE = "VLM_RUN"  # variable that passes the first process's choice to those that Lightning starts
PATIENCE = timedelta(minutes=10)  # processes of one run may start far apart on a busy cluster

_stores: list[Any] = []  # kept alive, because the first process serves them to the others


def started() -> tuple[int, int] | None:
    """Returns this process's rank and the number of processes if torchrun or srun started several; else None."""
    ours = rank_by_launcher(TORCHELASTIC)
    return (ours.rank, ours.world) if ours.world > 1 else None


def is_rank_zero() -> bool:
    """Returns True in the process that decides and writes."""
    ours = started()
    return ours[0] == 0 if ours else os.environ.get("LOCAL_RANK", "0") == "0" or CHOICE not in os.environ


def broadcast_choice(choose: Callable[[], str]) -> str:
    """The choice of rank zero, returned in every process of the run.

    Args:
        choose: Makes the choice; called in rank zero only.
    Raises:
        UserError: The choice failed; raised in all processes.
    """
    ours = started()
    if ours:
        return _broadcast_by_store(choose, *ours)
    if is_rank_zero():
        os.environ[CHOICE] = choose()
    return os.environ[CHOICE]


def _broadcast_by_store(choose: Callable[[], str], rank: int, world: int) -> str:
    store = _store(rank, world)
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
        store.wait([f"{name} read"], PATIENCE)
        raise
    return chosen


@contextmanager
def rank_zero_first(patience: timedelta = PATIENCE) -> Iterator[None]:
    """Lets rank zero run the block before the others, so that it writes and they read.

    Processes that Lightning starts begin after the first has run the block anyway.

    Args:
        patience: How long the others wait for it.
    """
    ours = started()
    if not ours:
        yield
        return
    rank, world = ours
    store = _store(rank, world)
    name = f"vlm turn {len(_stores)}"
    if rank > 0:
        store.wait([name], patience)
    try:
        yield
    finally:
        if rank == 0:
            store.set(name, "done")


def _store(rank: int, world: int) -> Any:
    """Returns a store that all processes reach: the one by which they will form their group."""
    import torch
    from lightning.fabric.plugins.environments import SLURMEnvironment

    if TORCHELASTIC not in os.environ:
        place = SLURMEnvironment(auto_requeue=False)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = place.main_address, str(place.main_port)
    store, *_ = next(torch.distributed.rendezvous("env://", rank, world, timeout=PATIENCE))
    _stores.append(store)
    return store


def check_devices(batch_size: int, samples: int, world_size: int) -> None:
    """Refuses a trainer for another number of processes than were started, and samples that they cannot divide.

    Args:
        batch_size: Samples of the global batch.
        samples: Samples of an epoch.
        world_size: Number of processes that the trainer expects.
    """
    ours = started()
    if ours and ours[1] != world_size:
        raise UserError(
            f"trainer.devices: {ours[1]} processes were started, and the trainer is set to {world_size}; "
            "give trainer=ddp and trainer.devices=N for the N processes of each machine"
        )
    if samples < world_size:
        raise UserError(f"data: {world_size} devices need as many training samples at least, not {samples}; add some")
    if batch_size % world_size:
        raise UserError(
            f"data.batch_size: {batch_size} samples cannot be divided among {world_size} devices; give a multiple"
        )
