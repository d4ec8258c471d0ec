"""A training of one process or several that is killed, and goes on each time that it is started."""

import os
import random
import shutil
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from compare import rows
from fork_server import ForkServer, ProcessResult
from small import BATCHES, command

EPOCHS = 3


@dataclass(frozen=True)
class Case:
    """A training, and how it is killed.

    Attributes:
        whom: Which of its processes get the signal: all ranks, one of them, or the group, the loaders' workers too.
    """

    task: str
    signum: signal.Signals
    whom: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    kills: int = 4

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole training."""
        batches = next((int(text[-1]) for text in self.overrides if "accumulate" in text), 1)
        return EPOCHS * -(-BATCHES // batches)

    def __str__(self) -> str:
        options = "-".join(text.rpartition(".")[2] for text in self.overrides)
        return f"{self.task}-{self.signum.name}-{self.whom}-{self.ranks}-{options}"


class Training:
    """A run that goes on each time that it is started.

    Args:
        ranks: Processes, started as torchrun would; with more than one there is no process over them.
    """

    def __init__(self, forks: ForkServer, case: Case, cwd: Path) -> None:
        self.forks, self.case, self.cwd = forks, case, cwd
        cwd.mkdir()
        self.pids: list[int] = []

    @property
    def folder(self) -> Path | None:
        found = list(self.cwd.glob("runs/*/20*"))
        assert len(found) <= 1, "a resumed run has its own folder"
        return found[0] if found else None

    @property
    def saved(self) -> bool:
        return self.folder is not None and any(self.folder.glob("checkpoints/*.ckpt"))

    def start(self, patches: tuple[str, ...] = ("", "")) -> None:
        """Starts it as a user would: with `resume=last` if it has saved anything, else from the beginning.

        Args:
            patches: Python that each process executes first.
        """
        args = ["resume=last"]
        if not self.saved:
            if self.folder:
                shutil.rmtree(self.folder)
            args = command(self.case.task, f"trainer.max_epochs={EPOCHS}", *self.case.overrides, *ddp(self.case.ranks))
        places = places_of(self.case.ranks)
        self.since = time.time_ns()
        self.pids = [
            self.forks.start(args, cwd=self.cwd, env=place, patch=patch)
            for place, patch in zip(places, patches, strict=False)
        ]

    def wait(self, timeout: float) -> list[ProcessResult]:
        """How its processes ended."""
        end = time.monotonic() + timeout
        found = [self.forks.wait(pid, max(0.0, end - time.monotonic())) for pid in self.pids]
        assert None not in found, "a process of the run hangs"
        return [ended for ended in found if ended]

    def steps(self) -> int:
        """Optimiser steps that it has logged; 0 until it has logged one since it was started."""
        try:
            logged = self.folder and (self.folder / "metrics.csv").stat().st_mtime_ns > self.since
            return len(rows(self.folder)) if self.folder and logged else 0
        except FileNotFoundError:
            return 0

    def kill_at(self, steps: int, delay: float, rng: random.Random) -> bool:
        """Sends the signal so long after so many steps; returns whether it found anything alive."""
        while self.steps() < steps and not self.forks.wait(self.pids[0]):
            time.sleep(0.005)
        time.sleep(delay)
        alive = [pid for pid in self.pids if self.forks.wait(pid) is None]
        if len(alive) < len(self.pids):
            return False
        for pid in [rng.choice(alive)] if self.case.whom == "one" else alive:
            (os.killpg if self.case.whom == "group" else os.kill)(pid, self.case.signum)
        return True


def ddp(ranks: int) -> list[str]:
    """The options of a run of several processes."""
    options = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.precision=32-true", f"trainer.devices={ranks}"]
    return options if ranks > 1 else []


def places_of(ranks: int) -> list[dict[str, str]]:
    """The environment that torchrun gives each of so many processes."""
    if ranks == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0"}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
