"""Trains a run: fit, test of the best checkpoint, printed summary, and error handling."""

import logging
import shlex
import signal
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlm.errors import SharedError, UserError, printable_lines
from vlm.evaluation.report.verdict import CONTROLS
from vlm.io.output import align_columns
from vlm.io.terminal import PIPE_WIDTH, fold, shell_line, train_command
from vlm.training.run import run_folder

if TYPE_CHECKING:
    from vlm.training.callbacks.signals import RunInterrupted
    from vlm.training.run.run import Run


def train(config: dict[str, Any], *, folder: Path | None = None, checkpoint: Path | None = None) -> int:
    """Trains with a checked config, in a new run folder or from a checkpoint of the run in `folder`.

    Raises:
        UserError: The config or the data are invalid, or the machine fails.
    """
    from vlm.training.callbacks.signals import RunInterrupted, raise_on_signal
    from vlm.training.run.run import Run

    silence_libraries()
    if not config["callbacks"].get("checkpoints"):
        raise UserError("callbacks.checkpoints: is required; a run is tested and resumed from its checkpoints")
    run = None
    try:
        with raise_on_signal():
            run = Run(config, folder=folder, checkpoint=checkpoint)
            run.fit()
            results = run.test() if config["test"] else {}
            if run.trainer.is_global_zero:
                notes = (
                    [split_note(config, results).strip(), column_note(results), *run.task.notes()] if results else []
                )
                verdict = run.task.verdict().lines() if results else []
                print(format_summary(run.checkpoints.best_or_last, results, run.example(), notes, verdict), flush=True)
    except RunInterrupted as interruption:
        return report_interruption(run, interruption)
    except Exception as fault:
        return report_failure(run, fault)
    finally:
        run_folder.release_runs()
    return 0


def report_interruption(run: "Run | None", interruption: "RunInterrupted") -> int:
    """Prints the command that resumes a run stopped by a signal, and returns the exit status.

    Args:
        run: The run; None if it was stopped before it was built.
        interruption: The signal, and whether the run was saved.
    """
    from vlm.training.run.processes import is_rank_zero

    if not is_rank_zero():  # after a save, another status would get the first process killed while it prints
        return 0 if interruption.saved else interruption.status
    if run and not interruption.saved and run.trainer.strategy.launcher:
        run.trainer.strategy.launcher.kill(signal.SIGTERM)
    state = f"{interruption}; the run is saved" if interruption.saved else f"{interruption}"
    # If nothing was saved, the callback that saves may not be set up yet.
    if run and (interruption.saved or (run.folder / "checkpoints" / "last.ckpt").is_file()):
        print(f"\n{state}. Resume it with:\n  {train_command(f'resume={run.folder}')}", flush=True)
    if interruption.signum == signal.SIGUSR1:
        print(run_folder.requeue_job(), flush=True)
    return interruption.status


def report_failure(run: "Run | None", fault: Exception) -> int:
    """Ends the other processes of a failed run and raises its error, or returns the status if rank zero reports it."""
    from vlm.training.run.faults import explain_error
    from vlm.training.run.launcher import end_processes

    error = explain_error(fault, run)
    if run:
        end_processes(run.trainer)
        if isinstance(error, SharedError) and not run.trainer.is_global_zero:
            return error.status
    if error is fault:
        raise fault
    raise error from fault


def format_summary(
    checkpoint: Path, results: dict[str, float], example: str, notes: Sequence[str], verdict: Sequence[str] = ()
) -> str:
    """Returns the summary of a finished run: scores, paths, and a command that uses the model.

    Args:
        checkpoint: The evaluated checkpoint, in the folder of its run.
        example: The command, which may quote the data.
        notes: Lines below the scores; empty ones are left out.
        verdict: Lines that compare the model with its baselines; empty without a test.
    """
    folder = checkpoint.parent.parent
    lines = ["", f"run         {folder}", f"checkpoint  {checkpoint}"]
    if results:
        report = folder / "evaluation" / next(iter(results)).split("/")[0] / "report.html"
        notes = [fold(note) for note in notes if note]
        lines = ["", f"the {checkpoint.stem} checkpoint", format_score_table(results), *notes, *lines]
        lines.append(f"report      {report}")
    lines.append(f"try         {shell_line([*shlex.split(example), '-c', str(checkpoint)])}")
    if not results:
        verdict = ["verdict     none, because the run was not tested. Test it with:"]
    lines += fold("\n".join(verdict), pipe_width=PIPE_WIDTH).splitlines()
    if not results:  # a command is one line, so that it can be copied
        lines.append(f"            {shell_line(['vlm', 'evaluate', '-c', str(checkpoint)])}")
    return printable_lines("\n".join(lines))


def split_note(config: dict[str, Any], results: dict[str, float]) -> str:
    """Returns a note if the checkpoint was selected on the split of the scores, else "".

    The note starts with a newline.
    """
    monitor = str((config["callbacks"].get("checkpoints") or {}).get("monitor"))
    split = next(iter(results)).split("/")[0]
    if not monitor.startswith(f"{split}/"):
        return ""
    return f"\n(the checkpoint was selected by {monitor}, so its {split} scores are slightly optimistic)"


def column_note(results: dict[str, float]) -> str:
    """Returns a note that explains the further columns of `format_score_table`."""
    columns = dict.fromkeys(name.split("@")[1] for name in results if "@" in name)
    notes = ["low, high: 95% interval"] if "low" in columns else []
    if baselines := [name for name in CONTROLS if name in columns]:
        notes.append(f"{', '.join(baselines)}: baseline{'s' * (len(baselines) > 1)} that a model should exceed")
    notes += ["ceiling: best possible score"] if "ceiling" in columns else []
    notes += ["sampled: estimate from random batches"] if "sampled" in columns else []
    return f"({'; '.join(notes)})" if notes else ""


def format_score_table(results: dict[str, float]) -> str:
    """Returns a table of scores, one row per metric, with a column per baseline or interval bound."""
    columns = dict.fromkeys(name.split("@")[1] for name in results if "@" in name)
    controls = sorted(columns, key=lambda name: ("low", "high", name).index(name))  # the interval first
    split = next(iter(results)).split("/")[0]
    suffixes = ["", *(f"@{control}" for control in controls)]
    rows = [
        [name.split("/")[1], *(_format_score(results.get(name + suffix)) for suffix in suffixes)]
        for name in results
        if "@" not in name
    ]
    return align_columns([[split, "model", *controls], *rows])


def _format_score(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.3e}"


def silence_libraries() -> None:
    """Silences log messages and warnings of libraries; vlm prints what the user needs."""
    libraries = "lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"
    for name in (*libraries, "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", module="torch")
