"""Sweeps: the jobs of `python train.py -m KEY=A,B` and the trials of Optuna's studies."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm.config.command import StoppedStudy
from vlm.config.target import find
from vlm.errors import UserError, printable
from vlm.io.files import write_text
from vlm.io.output import aligned
from vlm.io.terminal import train_command
from vlm.training.run import run_folder as slurm
from vlm.training.run.processes import broadcast_choice, is_rank_zero
from vlm.training.run.resume import resume_run
from vlm.training.run.run_folder import new_folder
from vlm.training.run.train import train

TIME = "2026-11-24_19-06-03"  # form of the first part of a folder's name
MOST_COMMANDS = 20  # printed after a stopped sweep
LONGEST = 120  # characters of a label in a folder's name; a file system takes 255 bytes


def label(overrides: list[str]) -> str:
    """Returns overrides as a folder's suffix, without characters that are special to a shell or a file system."""
    return re.sub(r"[^\w.,=+-]+", "-", "_".join(overrides), flags=re.ASCII)[:LONGEST]


def folders_of(config: dict[str, Any], overrides: list[str]) -> list[Path]:
    """The folders of the jobs with these overrides, the newest last."""
    place = Path(config["runs"]) / config["name"]
    return sorted(path for path in place.glob("*") if path.name[len(TIME) :].lstrip("_") == label(overrides))


def run_job(resolve: Callable[[], dict[str, Any]], overrides: list[str], record: Path, learns: bool = False) -> int:
    """Trains a job of a sweep in its own folder and keeps a record of it; returns its exit status.

    Args:
        resolve: Returns its config.
        overrides: The overrides that differ between jobs.
        record: The file for its record, since a launcher may run the job in another process.
        learns: Whether the sweeper is told the score. It is then the validation's, so that the test split chooses
            nothing.
    """
    row: dict[str, Any] = {"overrides": " ".join(overrides)}
    try:
        config = resolve()
        begun = slurm.begun(config, label(overrides))
        folder = begun or Path(broadcast_choice(lambda: str(new_folder(config, label(overrides)))))
        row["folder"] = str(folder)
        status = resume_run(str(folder), []) if begun else train(config, folder=folder)
        if status >= 128:
            row["stopped"] = True
        elif status:
            row["fault"] = f"ended with status {status}"
        else:
            row |= main_score(config, folder, tested=not learns)
    except KeyboardInterrupt:
        row["stopped"] = True
        raise
    except BaseException as fault:
        row["fault"] = (str(fault) or type(fault).__name__).split("\n")[0]
        raise
    finally:
        if is_rank_zero():
            write_text(record, json.dumps(row))
    return status


def main_score(config: dict[str, Any], folder: Path, *, tested: bool = True) -> dict[str, Any]:
    """Returns a run's main score: of its test, or of its best validation if it has no test or `tested` is False."""
    task: Any = find(config["task"]["_target_"])
    files = [folder / "evaluation" / split / "metrics.json" for split in ("test", "val") if tested]
    path = next((path for path in files if path.is_file()), None)
    if path is None:
        from vlm.checkpoint import load as ckpt

        checkpoints = config["callbacks"]["checkpoints"]
        scores = ckpt.read(folder)["vlm"]["scores"]
        name, falls = str(checkpoints["monitor"]), checkpoints["mode"] == "min"
    else:
        scores = json.loads(path.read_text(encoding="utf-8"))
        split = next(iter(scores)).split("/")[0]
        metric = next(name for name in (*task.headlines, "loss") if f"{split}/{name}" in scores)
        name, falls = f"{split}/{metric}", metric in task.smaller_is_better
    return {"metric": name, "score": scores[name], "falls": falls} if name in scores else {}


def told(record: Path) -> float | None:
    """The score of a job; None if it has none that is finite."""
    score = json.loads(record.read_text(encoding="utf-8")).get("score", math.nan)
    return score if math.isfinite(score) else None


def closing(records: Iterable[Path], left: Sequence[Sequence[str]] = (), study: StoppedStudy | None = None) -> str:
    """The table of a sweep: the overrides, score and folder of each job, the best first and those that failed last.

    Args:
        records: The records of the jobs, in the order of the jobs.
        left: The arguments of the jobs that a signal kept from ending, the stopped one first.
        study: The study that a signal stopped; None if none was stopped.
    """
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in records]
    stopped = rows[-1] if "stopped" in rows[-1] else {}
    remaining = _remaining(stopped, left) if left else _trials_left(stopped, study) if study else []
    rows.sort(key=lambda row: (*_unscored(row), row.get("metric", ""), _rank(row)))
    scores = aligned([["overrides", "score"], *map(_cells, rows)]).split("\n")
    ends = ["run", *(printable(row.get("fault") or row.get("folder", "")) for row in rows)]
    lines = [f"{score}  {end}".rstrip() for score, end in zip(scores, ends, strict=True)]
    text = "\n".join(["", f"{len(rows)} job{'s' * (len(rows) > 1)} of a sweep, the best first", *lines])
    if any(str(row.get("metric")).startswith("test/") for row in rows):
        text += "\n(the best of many scores on the test split is a little too good; test=false ranks by validation)"
    return "\n".join([text, *remaining])


def _remaining(stopped: Mapping[str, Any], left: Sequence[Sequence[str]]) -> list[str]:
    """Returns how to go on with a stopped sweep: a command for the stopped job, and one for each that did not run.

    Args:
        stopped: The record of the stopped job; empty if the signal came between two jobs.
        left: The arguments of the jobs that did not end, the stopped one first.
    """
    words = [_resuming(stopped) or left[0], *left[1:]]
    count = len(words) - bool(stopped)
    lines = ["", f"stopped: {count} job{'s' * (count != 1)} did not run. Go on with:"]
    lines += [f"  {train_command(*arguments)}" for arguments in words[:MOST_COMMANDS]]
    return lines + [f"  ... and {len(words) - MOST_COMMANDS} more"] * (len(words) > MOST_COMMANDS)


def _trials_left(stopped: Mapping[str, Any], study: StoppedStudy) -> list[str]:
    """Returns how many trials of a stopped study are left, and how to continue.

    Args:
        stopped: The record of the stopped trial; empty if the signal came between two trials.
    """
    lines = ["", f"stopped: {study.left} of {study.trials} trials are left."]
    if study.is_stored:
        lines[-1] += f" Continue with the same command{', which draws the stopped trial again' * bool(stopped)}:"
        lines.append(f"  {train_command(*study.arguments)}")
    else:
        lines[-1] += " The study is not stored, so a new one starts from its first trial. One that can continue:"
        stored = "hydra.sweeper.study_name=NAME", "hydra.sweeper.storage=sqlite:///FILE.db"
        lines.append(f"  {train_command(*study.arguments, *stored)}")
    if resuming := _resuming(stopped):
        lines += ["The run of the stopped trial resumes with this, outside of the study:"]
        lines += [f"  {train_command(*resuming)}"]
    return lines


def _resuming(stopped: Mapping[str, Any]) -> list[str]:
    """Returns the arguments that resume a stopped job; none if it saved no checkpoint."""
    folder = stopped.get("folder", "")
    saved = folder and (Path(folder) / "checkpoints" / "last.ckpt").is_file()
    return [f"resume={folder}"] if saved else []


def _unscored(row: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    return "fault" in row, "stopped" in row, "score" not in row


def _cells(row: dict[str, Any]) -> list[str]:
    for word, key in (("failed", "fault"), ("stopped", "stopped")):
        if key in row:
            return [row["overrides"], word]
    return [row["overrides"], f"{row['metric']} {row['score']:.4f}" if "score" in row else "none"]


def _rank(row: dict[str, Any]) -> float:
    score = row.get("score", math.inf)
    return math.inf if math.isnan(score) else score if row.get("falls") else -score


DIRECTIONS = {"min": "minimize", "max": "maximize"}
_OWN = "hydra.sweeper."


def begin_study(sweeper: dict[str, Any], config: dict[str, Any], typed: list[str], records: Path) -> list[str]:
    """Begins a study, or continues the stored one of its name; prints its metric and how many trials are done.

    Args:
        sweeper: Settings of Hydra's sweeper of optuna.
        config: The config that the trials share.
        typed: Keys that the command line sets, in its order.
        records: Folder for records of earlier trials.
    Returns:
        Further overrides of the sweeper: the direction, the number of trials left, and one job at a time, so that each
        learns from all before it.
    Raises:
        UserError: The study has another metric or direction, or its storage cannot be used.
    """
    checkpoints = config["callbacks"].get("checkpoints") or {}
    metric, direction = checkpoints.get("monitor"), DIRECTIONS[checkpoints.get("mode", "min")]
    if not metric:
        raise UserError("callbacks.checkpoints.monitor: name the metric that a study is told, such as val/loss")
    if f"{_OWN}direction" in typed and sweeper["direction"] != direction:
        raise UserError(f"{_OWN}direction: {metric} is to {direction}; leave it out")
    print(f"each trial is told its best {metric}, to {direction}", file=sys.stderr)
    own = {"direction": direction} | ({} if f"{_OWN}n_jobs" in typed else {"n_jobs": 1})
    if sweeper["storage"]:
        trials = _trials(sweeper, metric, direction)
        for number, trial in enumerate(trials):
            row = _record(trial, config, typed) | {"metric": metric, "falls": direction == "minimize"}
            write_text(records / f"before-{number:06}.json", json.dumps(row))
        done = sum(trial.state.is_finished() for trial in trials)
        own["n_trials"] = max(sweeper["n_trials"] - done, 0)
        print(f"study {sweeper['study_name']}: {done} of {sweeper['n_trials']} trials are done", file=sys.stderr)
        seed = sweeper["sampler"].get("seed")
        if seed is not None:  # the same seed would draw the same values again
            own["sampler.seed"] = seed + len(trials)
    return [f"{_OWN}{key}={value}" for key, value in own.items()]


def _trials(sweeper: dict[str, Any], metric: str, direction: str) -> list[Any]:
    """Returns the trials of a stored study, which is created if it is new."""
    import optuna

    if not sweeper["study_name"]:
        raise UserError(f"{_OWN}study_name: a study in a storage needs a name, by which it goes on")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            storage=sweeper["storage"], study_name=sweeper["study_name"], direction=direction, load_if_exists=True
        )
        before, now = study.user_attrs.get("metric"), f"{metric}, to {direction}"
        if before is None:
            study.set_user_attr("metric", now)
        elif before != now:
            raise UserError(f"{_OWN}study_name: {sweeper['study_name']} is told {before}, not {now}; choose another")
        return study.trials
    except UserError:
        raise
    except Exception as fault:  # SQLAlchemy raises many types, and its version 2 breaks optuna's storage
        reason = (str(fault) or type(fault).__name__).split("\n")[0]
        remedy = 'sqlite:///FILE.db needs pip install "vlm-lightning[optuna]"'
        raise UserError(f"{_OWN}storage: {printable(sweeper['storage'])}: {reason}; {remedy}") from fault


def _record(trial: Any, config: dict[str, Any], typed: list[str]) -> dict[str, Any]:
    """Returns an earlier trial's record as `run_job` wrote it: overrides in command-line order, folder and score."""
    names = sorted(trial.params, key=lambda name: typed.index(name) if name in typed else len(typed))
    overrides = [f"{name}={trial.params[name]}" for name in names]
    folder = str(next(reversed(folders_of(config, overrides)), "?"))
    row = {"overrides": " ".join(overrides), "folder": folder}
    if trial.value is not None:
        return row | {"score": trial.value}
    return row | ({"fault": f"failed: {folder}"} if trial.state.is_finished() else {"stopped": True})
