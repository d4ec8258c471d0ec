"""Failures of a run: the processes of its devices, which end together, and error messages with remedies."""

import errno
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import lightning as L

from vlm.config.tree import Config
from vlm.data.workers import end_workers
from vlm.errors import SharedError, UserError, is_out_of_memory, iter_causes
from vlm.io.terminal import train_command
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
            self.start_children()
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


# Parts of the error messages that a rank raises when another rank has died.
_CONNECTION_ERRORS = ("connection closed by peer", "connection reset", "broken pipe", "gloo", "nccl", "socket")
_FREE_SPACE = "free space, or choose another folder with runs=DIR"
_CHANGE_PERMISSIONS = "change its permissions, or choose another folder with runs=DIR"
_REMEDIES = {number: _FREE_SPACE for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
_REMEDIES |= {
    number: _CHANGE_PERMISSIONS for number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR)
}
_REMEDIES |= {number: "check the disk, or choose another folder with runs=DIR" for number in (errno.EIO, errno.ESTALE)}


class FailedRun(Protocol):
    """What error messages need of a run."""

    config: Config
    folder: Path
    trainer: L.Trainer


def explain_error(fault: Exception, run: FailedRun | None) -> Exception:
    """Converts an exception that ended a run to a UserError if there is a remedy; else returns it unchanged.

    Args:
        run: The run; None if it could not be built.
    """
    if run is None or run.trainer.state.fn is None:
        return fault if isinstance(fault, UserError) else _find_user_error(fault, Config()) or fault
    error = _find_user_error(fault, run.config)
    if run.trainer.world_size > 1 and not isinstance(error, SharedError):
        error = _add_rank(fault, error, run)
    if error is None:
        return fault
    saved = any((run.folder / "checkpoints").glob("*.ckpt"))
    if run.trainer.is_global_zero and (error.status == 1 or saved):
        precision = str(run.trainer.precision)
        return type(error)(f"{error}\n{describe_last_save(run.folder, error, precision=precision)}", error.status)
    return error


def _add_rank(fault: Exception, error: UserError | None, run: FailedRun) -> UserError | None:
    """Returns the error of a rank, with its number; None if it needs a traceback."""
    rank, chain = run.trainer.global_rank, list(iter_causes(fault))
    text = "\n".join(str(link) for link in chain if isinstance(link, RuntimeError)).lower()
    is_dist_error = any(type(link).__name__.startswith("Dist") for link in chain)
    if is_dist_error or any(words in text for words in _CONNECTION_ERRORS):  # another process has ended
        return _lost_process_error(run)
    if error is None:
        fault.add_note(f"raised on rank {rank} of {run.trainer.world_size}")
        return None
    return UserError(f"rank {rank}: {error}", error.status)


def describe_last_save(folder: Path, fault: Exception, *, precision: str) -> str:
    """Returns a line with the last checkpoint of a failed run and the command that resumes it.

    Args:
        precision: Precision of the run.
    """
    saved = [path for name in ("last", "previous") if (path := folder / "checkpoints" / f"{name}.ckpt").is_file()]
    if not saved:
        return "no checkpoint was saved yet; start the run again"
    command = train_command(f"resume={folder}", *getattr(fault, "overrides", ()))
    if getattr(fault, "repeats", False):
        message = f"the last good checkpoint is {saved[0]}; resuming from it fails in the same way"
        if precision.startswith(("32", "64")):
            return f"{message}; start again with a lower optim.lr"
        higher = f"{command} trainer.precision=32-true"
        return f"{message} unless the precision is higher ({higher}); else start again with a lower optim.lr"
    return f"the last checkpoint is intact: {saved[0]}; resume with: {command}"


def _find_user_error(fault: BaseException, config: Config) -> UserError | None:
    """Returns the UserError for a failure with a known remedy; None for an error that needs a traceback."""
    chain = list(iter_causes(fault))
    text = "\n".join(map(str, chain))
    if worker := re.search(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (?:is|was)? ?(.*)", text):
        killed = re.search(r"killed by signal: ([\w ]+)", worker[2])
        reason = f"was killed ({killed[1].strip()})" if killed else "ended unexpectedly"
        remedy = "probably out of memory; lower data.num_workers or data.batch_size"
        if "shared memory" in worker[2] or "Bus error" in worker[2]:
            remedy = "out of shared memory; give the container more (docker run --shm-size=8g)"
            remedy += ", or lower data.num_workers"
        return UserError(f"a data loader worker (pid {worker[1]}) {reason}, {remedy}", 1)
    if isinstance(fault, UserError):
        # An error raised in a worker arrives with the worker's traceback in its message, and without its status.
        inner = re.findall(r"^vlm\.errors\.\w+: ((?:.*\n?)+)", str(fault), re.MULTILINE)
        return UserError(inner[-1].strip(), 1) if inner and "DataLoader worker process" in str(fault) else fault
    if is_out_of_memory(fault):
        return UserError(_describe_out_of_memory(fault, text, config), 1)
    if any(type(link).__module__.startswith(("torch._dynamo", "torch._inductor")) for link in chain):
        lines = [line.strip() for line in str(fault).splitlines()]  # the first line may only say that a backend raised
        first = next((line for line in lines if line and not line.endswith("raised:")), type(fault).__name__)
        return UserError(f"torch.compile failed ({first[:160]}); set compile=false", 1)
    if type(fault).__name__ == "MisconfigurationException":  # Lightning's error for a setting that cannot work
        return UserError(f"trainer: {str(fault).splitlines()[0]}")
    if isinstance(fault, OSError) and fault.errno in _REMEDIES:
        where = f"{fault.filename}: " if fault.filename else ""
        return UserError(f"{where}{fault.strerror}; {_REMEDIES[fault.errno]}", 1)
    return None


def _describe_out_of_memory(fault: BaseException, text: str, config: Config) -> str:
    problem = "the GPU is out of memory" if "cuda" in text.lower() else "out of memory"
    advice = "lower data.batch_size and raise trainer.accumulate_grad_batches by the same factor"
    size, parts = config.get("data", {}).get("batch_size"), config.get("trainer", {}).get("accumulate_grad_batches", 1)
    if size and size % 2 == 0:
        smaller = f"data.batch_size={size // 2} trainer.accumulate_grad_batches={2 * parts}"
        advice = f"{smaller} takes the same optimizer steps with less memory"
    lines = str(fault).strip().splitlines() or [type(fault).__name__]
    return f"{problem} ({lines[0][:160]}); in a new run, {advice}; in an evaluation, lower data.eval_batch_size"


def _lost_process_error(run: FailedRun) -> UserError:
    """Returns the error for a process of the run that died."""
    launcher = run.trainer.strategy.launcher
    failed = launcher.find_failed_process() if isinstance(launcher, Launcher) and not is_started_process() else None
    if failed:
        return SharedError(describe_exit(*failed), 1)
    message = "another process of the run ended; unless it was killed, it printed the reason"
    if is_started_process():
        return SharedError(message, 1)
    return UserError(f"rank {run.trainer.global_rank}: {message}", 1)
