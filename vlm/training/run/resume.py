"""Resumes a run from its last checkpoint."""

import sys
from pathlib import Path
from typing import Any

from vlm.checkpoint.locate import LAST, RUNS, possible_folders, run_folders, suggest_run
from vlm.checkpoint.stored import thaw
from vlm.config import target
from vlm.config.tree import Config
from vlm.errors import UserError
from vlm.training.config.overrides import check_resume_overrides, split_option
from vlm.training.run.processes import broadcast_choice, is_rank_zero
from vlm.training.run.run_folder import check_same_run, lock_run

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
    from vlm.training.run.train import train

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


def check_steps(loaded: dict[str, Any], saved: Config, config: Config) -> None:
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


def count_epochs(loaded: dict[str, Any]) -> int:
    """Returns the number of completed epochs of a checkpoint."""
    return loaded["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]


def find_reached_limits(loaded: dict[str, Any], config: dict[str, Any]) -> str:
    """Returns the keys of the limits that a checkpoint has reached, joined by "and"; "" if training can continue."""
    limits = config["trainer"]
    done = {"max_epochs": count_epochs(loaded), "max_steps": loaded["global_step"]}
    return " and ".join(f"trainer.{name}" for name, count in done.items() if 0 < (limits.get(name) or -1) <= count)
