"""Starts a process per further device of a run, and ends all of them when one dies."""

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

PARENT_VARIABLE = "VLM_LAUNCHER"  # environment variable with the pid of rank zero, which the other ranks watch
POLL_SECONDS = 0.5
GRACE_SECONDS = 10.0  # in which rank zero can notice that a rank died, and report it


def is_started_process() -> bool:
    """Returns True in a process that rank zero of a run started."""
    return os.environ.get(PARENT_VARIABLE, str(os.getpid())) != str(os.getpid())


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
            os.environ[PARENT_VARIABLE] = str(os.getpid())
            self.start_others()
            threading.Thread(target=self._watch, daemon=True, name="watch over ranks").start()
        elif is_started_process():
            threading.Thread(target=_end_with_parent, daemon=True, name="watch over parent").start()
        return self.run(function, *args, **kwargs)

    def find_failed_process(self, timeout: float = GRACE_SECONDS / 2) -> tuple[int, int] | None:
        """Returns rank and exit code of a started process that fails within `timeout` seconds; None if none does."""
        until = time.monotonic() + timeout
        while not (failed := self._failed_processes()) and time.monotonic() < until:
            time.sleep(0.05)
        return failed[0] if failed else None

    def kill_processes(self) -> None:
        """Kills the started processes and waits for their end."""
        for process in self.procs:
            process.kill()
        for process in self.procs:
            process.wait()

    def _failed_processes(self) -> list[tuple[int, int]]:
        codes = [(rank, process.poll()) for rank, process in enumerate(self.procs, 1)]
        return [(rank, code) for rank, code in codes if code]

    def _watch(self) -> None:
        while not (failed := self._failed_processes()):
            time.sleep(POLL_SECONDS)
            if all(process.returncode == 0 for process in self.procs):
                return
        time.sleep(GRACE_SECONDS)
        print(f"error: {describe_exit(*failed[0])}; stopping the other ranks", file=sys.stderr, flush=True)
        self.kill_processes()
        end_workers()
        os._exit(1)


def _end_with_parent() -> None:
    while os.environ[PARENT_VARIABLE] == str(os.getppid()):
        time.sleep(POLL_SECONDS)
    end_workers()
    os._exit(1)


def describe_exit(rank: int, code: int) -> str:
    """Describes how a rank ended, from its exit code."""
    if code < 0:
        return f"rank {rank} was killed by {signal.Signals(-code).name}, probably because it ran out of memory"
    return f"rank {rank} ended with an error (see above)"


def end_processes(trainer: L.Trainer) -> None:
    """Ends the processes that a failed run started. Does nothing in a started process, which ends by itself."""
    if isinstance(trainer.strategy.launcher, Launcher):
        trainer.strategy.launcher.kill_processes()
