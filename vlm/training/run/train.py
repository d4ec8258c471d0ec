"""A whole training: fit, test of the best checkpoint, last lines, and errors."""

import logging
import shlex
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlm.errors import SharedError, UserError, printable_lines
from vlm.evaluation.report.verdict import CONTROLS
from vlm.io.output import aligned
from vlm.io.terminal import PIPE_WIDTH, folded, shell_line, train_command
from vlm.training.run import run_folder


def train(config: dict[str, Any], *, folder: Path | None = None, checkpoint: Path | None = None) -> int:
    """Trains as a checked config says, in a new run folder or on from a checkpoint of the run in `folder`.

    Raises:
        UserError: The config, the data or the machine is at fault.
    """
    from vlm.training.callbacks.signals import Stopped, stopping
    from vlm.training.run.run import Run

    quiet()
    if not config["callbacks"].get("checkpoints"):
        raise UserError("callbacks.checkpoints: cannot be left out; a run is tested and resumed from what it saves")
    run = None
    try:
        with stopping():
            run = Run(config, folder=folder, checkpoint=checkpoint)
            run.fit()
            results = run.test() if config["test"] else {}
            if run.trainer.is_global_zero:
                notes = [column_note(results), *run.task.notes()] if results else []
                below = "\n".join([split_note(config, results), *notes])
                verdict = run.task.verdict().lines() if results else []
                print(closing(run.checkpoints.best_or_last, results, run.example(), below, verdict), flush=True)
    except Stopped as stop:
        return leave(run, stop)
    except Exception as fault:
        return fail(run, fault)
    finally:
        run_folder.leave()
    return 0


def leave(run: Any, stop: Any) -> int:
    """Prints the command that resumes a run stopped by a signal, and returns the exit status.

    Args:
        run: The run; None if it was stopped before it was built.
        stop: The vlm.training.callbacks.signals.Stopped.
    """
    from vlm.training.run import run_folder as slurm
    from vlm.training.run.processes import is_rank_zero

    if not is_rank_zero():  # after a save, another status would get the first process killed while it prints
        return 0 if stop.saved else stop.status
    if run and not stop.saved and run.trainer.strategy.launcher:
        run.trainer.strategy.launcher.kill(signal.SIGTERM)
    if stop.saved:
        print(f"\n{stop}; everything is saved. Go on with:\n  {resume_command(run.folder)}", flush=True)
    elif run and (run.folder / "checkpoints" / "last.ckpt").is_file():  # the callback that saves may not be set up yet
        print(f"\n{stop}. Go on with:\n  {resume_command(run.folder)}", flush=True)
    if stop.signum == signal.SIGUSR1:
        print(slurm.requeue(), flush=True)
    return stop.status


def fail(run: Any, fault: Exception) -> int:
    """Ends the other processes of a run and raises its error; returns the status if rank zero prints it."""
    from vlm.training.run.faults import explain
    from vlm.training.run.launcher import end_processes

    error = explain(fault, run)
    if run:
        end_processes(run.trainer)
        if isinstance(error, SharedError) and not run.trainer.is_global_zero:
            return error.status
    if error is fault:
        raise fault
    raise error from fault


def resume_command(folder: Path) -> str:
    return train_command(f"resume={folder}")


def closing(checkpoint: Path, results: dict[str, float], example: str, below: str, verdict: Sequence[str] = ()) -> str:
    """The last lines of a finished run: scores, paths, and the next command to try, which may quote the data.

    Args:
        checkpoint: The evaluated one, in the folder of its run.
        below: Lines below the scores, each after a line end.
        verdict: Lines on what the model is better or worse than; none without a test.
    """
    folder = checkpoint.parent.parent
    lines = ["", f"run         {folder}", f"checkpoint  {checkpoint}"]
    if results:
        report = folder / "evaluation" / next(iter(results)).split("/")[0] / "report.html"
        scores = table(results) + folded(below)
        lines = ["", f"the {checkpoint.stem} checkpoint", scores, *lines, f"report      {report}"]
    lines.append(f"try         {shell_line([*shlex.split(example), '-c', str(checkpoint)])}")
    if not results:
        verdict = ["verdict     none, because nothing was tested; test it with"]
    sentences = folded("\n".join(verdict), pipe_width=PIPE_WIDTH).splitlines()
    if not results:
        sentences.append(
            f"            {shell_line(['vlm', 'evaluate', '-c', str(checkpoint)])}"
        )  # to be copied: one line
    return printable_lines("\n".join([*lines, *sentences]))


def split_note(config: dict[str, Any], results: dict[str, float]) -> str:
    """A note if the scores are of the split that chose the checkpoint."""
    monitor = str((config["callbacks"].get("checkpoints") or {}).get("monitor"))
    if not results:
        return ""
    split = next(iter(results)).split("/")[0]
    if not monitor.startswith(f"{split}/"):
        return ""
    return f"\n({split} also chose the checkpoint, by {monitor.split('/')[1]}: its scores are a little too good)"


def column_note(results: dict[str, float]) -> str:
    """Returns what the columns of `table` beside the model's are."""
    columns = dict.fromkeys(name.split("@")[1] for name in results if "@" in name)
    notes = ["low, high: 95% interval"] if "low" in columns else []
    if baselines := [name for name in CONTROLS if name in columns]:
        notes.append(f"{', '.join(baselines)}: baseline{'s' * (len(baselines) > 1)}, which a model should beat")
    notes += ["ceiling: best score that is possible"] if "ceiling" in columns else []
    notes += ["sampled: estimate from random batches"] if "sampled" in columns else []
    return f"({'; '.join(notes)})" if notes else ""


def table(results: dict[str, float]) -> str:
    """Returns a table of scores, one line per metric, with their controls beside them."""
    columns = dict.fromkeys(name.split("@")[1] for name in results if "@" in name)
    controls = sorted(columns, key=lambda name: ("low", "high", name).index(name))  # the interval before the controls
    split = next(iter(results)).split("/")[0]
    places = ["", *(f"@{control}" for control in controls)]
    rows = [
        [name.split("/")[1], *(_number(results.get(name + place)) for place in places)]
        for name in results
        if "@" not in name
    ]
    return aligned([[split, "model", *controls], *rows])


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.3e}"


def quiet() -> None:
    """Silences messages of libraries; vlm itself prints what concerns the user."""
    libraries = "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"
    for name in (*libraries, "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", module="torch")
