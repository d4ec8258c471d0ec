"""The processes that a run starts for its further devices; when one dies, all end soon."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning as L

from vlm.data.workers import end_workers
from vlm.training.step.lightning_private import ScriptLauncher

PARENT = "VLM_LAUNCHER"  # variable with the id of the first process, which the others watch
POLL = 0.5  # seconds
GRACE = 10.0  # seconds in which the first process can notice by itself that another is gone, and report it


def started() -> bool:
    """Returns True in a process that rank zero of a run started."""
    return os.environ.get(PARENT, str(os.getpid())) != str(os.getpid())


class Launcher(ScriptLauncher):
    """Starts a process for each further device, and ends all of them when one dies.

    A process that waits for a dead one may hang: on GPUs, until a timeout of half an hour. Lightning's launcher kills
    the first process too, before it has reported the fault. Torch's elastic agent does not fit: if it is killed, its
    ranks keep running; and when a rank dies, it sends SIGTERM to the others at once, so that they would save and stop
    before they can report which rank died and how to resume.
    """

    def launch(self, function: Callable, *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[PARENT] = str(os.getpid())
            self.start_others()
            threading.Thread(target=self._watch, daemon=True, name="watch over ranks").start()
        elif started():
            threading.Thread(target=_end_with_parent, daemon=True, name="watch over parent").start()
        return self.run(function, *args, **kwargs)

    def lost(self, patience: float = GRACE / 2) -> tuple[int, int] | None:
        """Returns rank and exit code of a started process that fails within `patience` seconds; None if none does."""
        until = time.monotonic() + patience
        while not (failed := self._failed()) and time.monotonic() < until:
            time.sleep(0.05)
        return failed[0] if failed else None

    def end(self) -> None:
        """Kills the processes that this one started."""
        for process in self.procs:
            process.kill()
        for process in self.procs:
            process.wait()

    def _failed(self) -> list[tuple[int, int]]:
        codes = [(rank, process.poll()) for rank, process in enumerate(self.procs, 1)]
        return [(rank, code) for rank, code in codes if code]

    def _watch(self) -> None:
        while not (failed := self._failed()):
            time.sleep(POLL)
            if all(process.returncode == 0 for process in self.procs):
                return
        time.sleep(GRACE)
        print(f"error: {describe(*failed[0])}; the others are stopped", file=sys.stderr, flush=True)
        self.end()
        end_workers()
        os._exit(1)


def _end_with_parent() -> None:
    while os.environ[PARENT] == str(os.getppid()):
        time.sleep(POLL)
    end_workers()
    os._exit(1)


def describe(rank: int, code: int) -> str:
    """Returns a line that says how a rank ended, from its exit code."""
    if code < 0:
        return f"rank {rank} was killed by {signal.Signals(-code).name}, mostly for want of memory"
    return f"rank {rank} ended with an error, which stands above"


def end_processes(trainer: L.Trainer) -> None:
    """Ends the processes that a run has started, if it failed; a started one ends by itself."""
    if isinstance(trainer.strategy.launcher, Launcher):
        trainer.strategy.launcher.end()
