"""Error messages for machine failures (full disks, dead processes, too little memory), with remedies."""

import errno
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm.errors import SharedError, UserError, is_out_of_memory, iter_causes
from vlm.io.terminal import train_command
from vlm.training.run.launcher import Launcher, describe_exit, is_started_process

if TYPE_CHECKING:
    from vlm.training.run.run import Run

# Parts of the error messages that a rank raises when another rank has died.
_CONNECTION_ERRORS = ("connection closed by peer", "connection reset", "broken pipe", "gloo", "nccl", "socket")
_FREE_SPACE = "free space, or choose another folder with runs=DIR"
_CHANGE_PERMISSIONS = "change its permissions, or choose another folder with runs=DIR"
_REMEDIES = {number: _FREE_SPACE for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
_REMEDIES |= {
    number: _CHANGE_PERMISSIONS for number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR)
}
_REMEDIES |= {number: "check the disk, or choose another folder with runs=DIR" for number in (errno.EIO, errno.ESTALE)}


def explain_error(fault: Exception, run: "Run | None") -> Exception:
    """Converts an exception that ended a run to a UserError if there is a remedy; else returns it unchanged.

    Args:
        run: The run; None if it could not be built.
    """
    if run is None or run.trainer is None or run.trainer.state.fn is None:
        return fault if isinstance(fault, UserError) else _find_user_error(fault, {}) or fault
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


def _add_rank(fault: Exception, error: UserError | None, run: "Run") -> UserError | None:
    """Returns the error of a rank, with its number; None if it needs a traceback."""
    rank = run.trainer.global_rank
    if _is_lost_connection(fault):
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


def _find_user_error(fault: BaseException, config: dict[str, Any]) -> UserError | None:
    """Returns the UserError for a failure with a known remedy; None for an error that needs a traceback."""
    chain = list(iter_causes(fault))
    text = "\n".join(map(str, chain))
    if worker := re.search(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (?:is|was)? ?(.*)", text):
        return UserError(_describe_dead_worker(worker[1], worker[2]), 1)
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


def _describe_out_of_memory(fault: BaseException, text: str, config: dict[str, Any]) -> str:
    problem = "the GPU is out of memory" if "cuda" in text.lower() else "out of memory"
    advice = "lower data.batch_size and raise trainer.accumulate_grad_batches by the same factor"
    size, parts = config.get("data", {}).get("batch_size"), config.get("trainer", {}).get("accumulate_grad_batches", 1)
    if size and size % 2 == 0:
        smaller = f"data.batch_size={size // 2} trainer.accumulate_grad_batches={2 * parts}"
        advice = f"{smaller} takes the same optimizer steps with less memory"
    lines = str(fault).strip().splitlines() or [type(fault).__name__]
    return f"{problem} ({lines[0][:160]}); in a new run, {advice}; in an evaluation, lower data.eval_batch_size"


def _describe_dead_worker(pids: str, ending: str) -> str:
    killed = re.search(r"killed by signal: ([\w ]+)", ending)
    reason = f"was killed ({killed[1].strip()})" if killed else "ended unexpectedly"
    remedy = "probably out of memory; lower data.num_workers or data.batch_size"
    if "shared memory" in ending or "Bus error" in ending:
        remedy = "out of shared memory; give the container more (docker run --shm-size=8g), or lower data.num_workers"
    return f"a data loader worker (pid {pids}) {reason}, {remedy}"


def _is_lost_connection(fault: BaseException) -> bool:
    """Returns True for an error that only reports the loss of the connection to another process."""
    kinds = [type(link).__name__ for link in iter_causes(fault)]
    text = "\n".join(str(link) for link in iter_causes(fault) if isinstance(link, RuntimeError)).lower()
    return any(kind.startswith("Dist") for kind in kinds) or any(words in text for words in _CONNECTION_ERRORS)


def _lost_process_error(run: "Run") -> UserError:
    """Returns the error for a process of the run that died."""
    launcher = run.trainer.strategy.launcher
    failed = launcher.find_failed_process() if isinstance(launcher, Launcher) and not is_started_process() else None
    if failed:
        return SharedError(describe_exit(*failed), 1)
    message = "another process of the run ended; unless it was killed, it printed the reason"
    return (
        SharedError(message, 1) if is_started_process() else UserError(f"rank {run.trainer.global_rank}: {message}", 1)
    )
