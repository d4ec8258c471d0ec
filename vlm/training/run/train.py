"""Trains a new run, or resumes one from its last checkpoint: fit, test, printed summary, and error handling."""

import logging
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlm.checkpoint.locate import LAST, RUNS, possible_folders, run_folders, suggest_run
from vlm.checkpoint.stored import Checkpoint, thaw
from vlm.config import target
from vlm.config.tree import Config
from vlm.errors import SharedError, UserError, printable_lines
from vlm.evaluation.report.content import CONTROLS
from vlm.io.output import align_columns
from vlm.io.terminal import PIPE_WIDTH, fold, shell_line, train_command
from vlm.training.config.nodes import check_resume_overrides, split_option
from vlm.training.run import run_folder
from vlm.training.run.processes import broadcast_choice, is_rank_zero
from vlm.training.run.run_folder import check_same_run, lock_run

if TYPE_CHECKING:
    from vlm.training.callbacks.signals import RunInterrupted
    from vlm.training.run.run import Run


def train(config: Config, *, folder: Path | None = None, checkpoint: Path | None = None) -> int:
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
                notes, verdict = [], []
                if results:
                    notes = [split_note(config, results).strip(), column_note(results), *run.task.notes()]
                    verdict = run.task.verdict().lines()
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
    if not is_rank_zero():  # with another status after a save, a launcher would kill rank zero while it prints
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
    from vlm.training.run.faults import Launcher, explain_error

    error = explain_error(fault, run)
    if run:
        if isinstance(run.trainer.strategy.launcher, Launcher):  # not in a started process, which ends by itself
            run.trainer.strategy.launcher.kill_processes()
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


def split_note(config: Config, results: dict[str, float]) -> str:
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


CHECKPOINT_NAMES = ("last.ckpt", "previous.ckpt")  # in the order in which they are tried


def resume_run(where: str, overrides: list[str]) -> int:
    """Resumes a run and returns the exit status.

    Args:
        where: The run's folder, one of its checkpoints, a folder of runs for the newest in it, or "last" for the
            newest run under runs/.
        overrides: New values of keys in RESUMABLE.
    """
    package, overrides = split_option(overrides, "trust")
    if package is not None:
        target.check_package(package)
        target.trust(package)
    path = Path(
        broadcast_choice(lambda: str(find_checkpoint(where)))
    )  # a missing run is reported before torch is imported

    from vlm.checkpoint import load as ckpt
    from vlm.checkpoint.rebuild import convert_errors
    from vlm.training.config.check import check

    folder = path.parent.parent
    loaded = ckpt.read(path)
    if "optimizer_states" not in loaded:
        last = path.with_name(CHECKPOINT_NAMES[0])
        raise UserError(
            f"resume={where}: {path.name} has no optimiser state to resume from; "
            f"{f'resume {last}' if last.is_file() else f'resume a run, or its {last.name}'}"
        )
    with convert_errors(path):
        saved = thaw(loaded["vlm"]["config"])
        find_reached_limits(loaded, saved)
    config = check_resume_overrides(overrides, saved)
    config.typed = [*loaded["vlm"].get("typed", ()), *overrides]
    check(config)
    check_steps(loaded, saved, config)
    if is_rank_zero():
        check_same_run(folder, saved)
    if (limits := find_reached_limits(loaded, config)) and any(folder.glob("evaluation/*/report.html")):
        if is_rank_zero():
            step = loaded["global_step"]
            print(
                f"{folder}: the run is finished, at step {step}; raise {limits} to continue training, with "
                f"schedule_steps={step} to keep the last learning rate"
            )
        return 0
    if is_rank_zero():
        lock_run(folder)
        print(f"resuming {folder} at step {loaded['global_step']}", file=sys.stderr)
    return train(config, folder=folder, checkpoint=path)


def find_checkpoint(where: str) -> Path:
    """Returns the checkpoint to resume from.

    Args:
        where: As in `resume_run`.
    Raises:
        UserError: There is none, or it cannot be read.
    """
    try:
        return _find_checkpoint(where)
    except OSError as fault:
        reason = f"{fault.filename}: cannot be read ({fault.strerror})"
        raise UserError(f"resume={where}: {reason}; change its permissions, or resume another run") from fault


def _find_checkpoint(where: str) -> Path:
    if where == LAST:
        return find_newest_checkpoint(
            RUNS, "resume=last: there is no run with a checkpoint under runs/; name a run's folder"
        )
    for folder in possible_folders(where):
        if (folder / "checkpoints").is_dir():
            return find_last_checkpoint(folder)
        if folder.is_dir() and run_folders(folder):
            return find_newest_checkpoint(
                folder, f"resume={where}: no run in {folder} has an intact checkpoint; name another run"
            )
    path = Path(where)
    if path.is_dir():
        raise UserError(f"resume={where}: there is no checkpoint at {path / 'checkpoints'}; name a run's folder")
    if not path.is_file():
        remedy = f"give a run's folder, its name, a .ckpt file, or last{suggest_run(where)}"
        raise UserError(f"resume={where}: no such run or checkpoint; {remedy}")
    return path


def find_newest_checkpoint(runs: Path, error: str) -> Path:
    """Returns the last checkpoint of the newest run that has an intact one. Prints which are damaged.

    Args:
        error: Message of the UserError if there is none.
    """
    for folder in run_folders(runs):
        try:
            return find_last_checkpoint(folder)
        except UserError as fault:
            print(f"skipped: {fault}", file=sys.stderr)
    raise UserError(error)


def find_last_checkpoint(folder: Path) -> Path:
    """Returns the last intact checkpoint of a run. Prints which are damaged."""
    from vlm.checkpoint import load as ckpt

    faults = []
    for path in (folder / "checkpoints" / name for name in CHECKPOINT_NAMES):
        if not path.is_file():  # killed between two renames, on a file system without hard links
            continue
        try:
            ckpt.read(path)
        except UserError as fault:
            faults.append(str(fault))
            continue
        for message in faults:
            print(f"skipped: {message}", file=sys.stderr)
        return path
    reasons = "; ".join(faults) or "none was saved yet; start the run again"
    raise UserError(f"{folder}: no checkpoint to resume from ({reasons})")


def check_steps(loaded: Checkpoint, saved: Config, config: Config) -> None:
    """Checks that gradient accumulation is unchanged and that the new limits are not exceeded already.

    Raises:
        UserError: It names the key and both values.
    """
    limits = config["trainer"]
    before, now = (values.get("accumulate_grad_batches", 1) for values in (saved["trainer"], limits))
    if before != now:
        raise UserError(
            f"trainer.accumulate_grad_batches: is {before} and cannot become {now} in a resumed run; leave it out, or "
            "start a new run"
        )
    for name, done in {"max_epochs": count_epochs(loaded), "max_steps": loaded["global_step"]}.items():
        if 0 <= (limits.get(name) or -1) < done:
            raise UserError(
                f"trainer.{name}: {limits[name]} is less than the {done} completed; set a higher value, or leave it out"
            )


def count_epochs(loaded: Checkpoint) -> int:
    """Returns the number of completed epochs of a checkpoint."""
    return loaded["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]


def find_reached_limits(loaded: Checkpoint, config: Config) -> str:
    """Returns the keys of the limits that a checkpoint has reached, joined by "and"; "" if training can continue."""
    limits = config["trainer"]
    done = {"max_epochs": count_epochs(loaded), "max_steps": loaded["global_step"]}
    return " and ".join(f"trainer.{name}" for name, count in done.items() if 0 < (limits.get(name) or -1) <= count)
