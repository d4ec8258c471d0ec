"""Faults that strike a training, and trainings of two processes.

Run as a program it is `train.py` with the fault that the environment names: Lightning starts it for the second rank.
"""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fork_server import ForkServer, ProcessResult
from trainings import ddp, places_of

if TYPE_CHECKING:
    import pytest

DDP = ddp(2)
EXACT = ["model.size.dropout=0", "trainer.max_epochs=2"]  # what one process and two can do alike


def run_two(
    forks: ForkServer, args: Sequence[str], *, cwd: Path, patch: str = "", timeout: float = 60
) -> list[ProcessResult]:
    """Runs a training in two processes as torchrun would start them; how each ended within the time."""
    pids = [forks.start(args, cwd=cwd, env=env, patch=patch) for env in places_of(2)]
    ended = [forks.wait(pid, timeout=timeout) for pid in pids]
    for pid, end in zip(pids, ended, strict=True):
        if end is None:
            os.kill(pid, signal.SIGKILL)
    assert None not in ended, "a rank hangs"
    return [end for end in ended if end is not None]


def on_step(step: int, act: Callable[[], None], patch: "pytest.MonkeyPatch") -> None:
    """Lets something happen before a step, counted from 0, once."""
    from vlm.training.step.task import Task

    patch.setattr(Task, "training_step", Task.training_step)  # to be put back
    done: list[int] = []
    _before_step(lambda task: task.global_step == step and not done, lambda task: (done.append(step), act()))


def _before_step(when: Callable[[Any], bool], act: Callable[[Any], Any]) -> None:
    from vlm.training.step.task import Task

    train = Task.training_step

    def training_step(task: Task, batch: Any, batch_idx: int) -> Any:
        if when(task):
            act(task)
        return train(task, batch, batch_idx)

    Task.training_step = training_step  # type: ignore[method-assign]


def strike(kind: str, step: int, rank: int = 0) -> None:
    """Lets a fault happen before the training batch of a step, counted from 0, on one rank."""
    _before_step(lambda task: task.global_step == step and task.global_rank == rank, FAULTS[kind])


def _kill(task: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_worker(task: Any) -> None:
    import multiprocessing

    child = multiprocessing.active_children()[0]
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    time.sleep(0.5)  # it is the loader that finds it dead


def _raise(task: Any) -> None:
    raise RuntimeError("the original fault")


def _no_memory(task: Any) -> None:
    """Leaves the process hardly more memory than it has, and asks for a batch's worth."""
    import torch

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**24, resource.RLIM_INFINITY))
    torch.ones(2**28)


def _nan_loss(task: Any) -> None:
    loss = task.loss

    def once(batch: Any) -> Any:
        task.loss = loss
        return {name: replace(term, total=term.total * float("nan")) for name, term in loss(batch).items()}

    task.loss = once


def _nan_gradient(task: Any) -> None:
    parameter = next(task.model.parameters())
    hooks = [parameter.register_hook(lambda gradient: (hooks[0].remove(), gradient * float("nan"))[1])]


FAULTS: dict[str, Callable[[Any], None]] = {
    "kill": _kill,
    "kill worker": _kill_worker,
    "raise": _raise,
    "no memory": _no_memory,
    "nan loss": _nan_loss,
    "nan gradient": _nan_gradient,
}


if __name__ == "__main__":
    from vlm.training.run.fit import main

    kind, step, rank = os.environ["FAULT"].split(":")
    strike(kind, int(step), int(rank))
    sys.exit(main())
