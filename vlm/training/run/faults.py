"""Messages for faults of the machine (full disks, lost processes, too little memory), with the remedy."""

import errno
import re
from pathlib import Path
from typing import Any

from vlm.errors import SharedError, UserError, causes, is_out_of_memory
from vlm.io.terminal import train_command
from vlm.training.run.launcher import Launcher, describe, started

# Parts of the messages that a rank raises when another one is gone.
_LOST = ("connection closed by peer", "connection reset", "broken pipe", "gloo", "nccl", "socket")
_SPACE = "free space, or choose another place: runs=DIR"
_RIGHTS = "change its permissions, or choose another place: runs=DIR"
_REMEDIES = {number: _SPACE for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
_REMEDIES |= {number: _RIGHTS for number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR)}
_REMEDIES |= {number: "check the disk, or choose another place: runs=DIR" for number in (errno.EIO, errno.ESTALE)}


def explain(fault: Exception, run: Any) -> Exception:
    """Converts an exception that ended a run to a UserError if there is a remedy; else returns it as it is.

    Args:
        run: The vlm.training.run.run.Run; None if building it failed.
    """
    if run is None or not _began(run):
        return fault if isinstance(fault, UserError) else _reworded(fault, {}) or fault
    error = _reworded(fault, run.config)
    if run.trainer.world_size > 1 and not isinstance(error, SharedError):
        error = _of_a_rank(fault, error, run)
    if error is None:
        return fault
    saved = any((run.folder / "checkpoints").glob("*.ckpt"))
    if run.trainer.is_global_zero and (error.status == 1 or saved):
        precision = str(run.trainer.precision)
        return type(error)(f"{error}\n{standing(run.folder, error, precision=precision)}", error.status)
    return error


def _of_a_rank(fault: Exception, error: UserError | None, run: Any) -> UserError | None:
    """Returns the error of a rank that failed alone; None if it needs a traceback."""
    rank = run.trainer.global_rank
    if _is_lost(fault):
        return _lost(run)
    if error is None:
        fault.add_note(f"raised on rank {rank} of {run.trainer.world_size}")
        return None
    return UserError(f"rank {rank}: {error}", error.status)


def _began(run: Any) -> bool:
    return run.trainer is not None and run.trainer.state.fn is not None


def standing(folder: Path, fault: Exception, *, precision: str) -> str:
    """Returns a line that names the last save of a failed run and the command that resumes it.

    Args:
        precision: Precision of the run.
    """
    saved = [path for name in ("last", "previous") if (path := folder / "checkpoints" / f"{name}.ckpt").is_file()]
    if not saved:
        return "no checkpoint had been written yet: start the run again"
    command = train_command(f"resume={folder}", *getattr(fault, "overrides", ()))
    if getattr(fault, "repeats", False):
        finer = f", unless it computes in more bits: {command} trainer.precision=32-true; else"
        again = f"the last good state is in {saved[0]}; from there the same comes again"
        return f"{again}{';' if precision.startswith(('32', '64')) else finer} start again with a lower optim.lr"
    return f"the last save is whole, {saved[0]}; go on with: {command}"


def _reworded(fault: BaseException, config: dict[str, Any]) -> UserError | None:
    """The UserError for a fault of the machine; None for an error that needs a traceback."""
    chain = list(causes(fault))
    text = "\n".join(map(str, chain))
    if worker := re.search(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (?:is|was)? ?(.*)", text):
        return UserError(_worker(worker[1], worker[2]), 1)
    if isinstance(fault, UserError):
        # An error raised in a worker arrives with the worker's traceback in its message, and without its status.
        inner = re.findall(r"^vlm\.errors\.\w+: ((?:.*\n?)+)", str(fault), re.MULTILINE)
        return UserError(inner[-1].strip(), 1) if inner and "DataLoader worker process" in str(fault) else fault
    if is_out_of_memory(fault):
        return UserError(_memory(fault, text, config), 1)
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


def _memory(fault: BaseException, text: str, config: dict[str, Any]) -> str:
    what = "the GPU is out of memory" if "cuda" in text.lower() else "out of memory"
    advice = "lower data.batch_size, raise trainer.accumulate_grad_batches by as much"
    size, parts = config.get("data", {}).get("batch_size"), config.get("trainer", {}).get("accumulate_grad_batches", 1)
    if size and size % 2 == 0:
        advice = f"data.batch_size={size // 2} trainer.accumulate_grad_batches={2 * parts} takes the same steps in less"
    lines = str(fault).strip().splitlines() or [type(fault).__name__]
    return f"{what} ({lines[0][:160]}); in a new run, {advice}; in an evaluation it is data.eval_batch_size"


def _worker(pids: str, how: str) -> str:
    killed = re.search(r"killed by signal: ([\w ]+)", how)
    reason = f"was killed ({killed[1].strip()})" if killed else "ended unexpectedly"
    remedy = "mostly for want of memory; lower data.num_workers or data.batch_size"
    if "shared memory" in how or "Bus error" in how:
        remedy = (
            "for want of shared memory; give the container more (docker run --shm-size=8g), or lower data.num_workers"
        )
    return f"a process that reads data (pid {pids}) {reason}, {remedy}"


def _is_lost(fault: BaseException) -> bool:
    """Returns True for a fault that is only the loss of another process."""
    kinds = [type(link).__name__ for link in causes(fault)]
    text = "\n".join(str(link) for link in causes(fault) if isinstance(link, RuntimeError)).lower()
    return any(kind.startswith("Dist") for kind in kinds) or any(words in text for words in _LOST)


def _lost(run: Any) -> UserError:
    """The message for a lost process."""
    launcher = run.trainer.strategy.launcher
    gone = launcher.lost() if isinstance(launcher, Launcher) and not started() else None
    if gone:
        return SharedError(describe(*gone), 1)
    message = "another process of the run is gone; if it was not killed, it said why"
    return SharedError(message, 1) if started() else UserError(f"rank {run.trainer.global_rank}: {message}", 1)
