"""Sweeps: the jobs of `python train.py -m KEY=A,B` and the trials of Optuna's studies."""

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vlm.config.command import StoppedStudy, StudySettings
from vlm.config.target import find
from vlm.config.tree import Config
from vlm.errors import UserError, printable
from vlm.io.files import write_text
from vlm.io.output import align_columns
from vlm.io.terminal import train_command
from vlm.training.run.processes import broadcast_choice, is_rank_zero
from vlm.training.run.run_folder import create_run_folder, find_requeued_run
from vlm.training.run.train import resume_run, train

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from vlm.training.step.task import Task

TIMESTAMP = "2026-11-24_19-06-03"  # form of the first part of a run folder's name
MAX_COMMANDS = 20  # printed after a stopped sweep
MAX_SUFFIX = 120  # characters of a folder's suffix; a file system allows 255 bytes per name
OPTUNA_DIRECTIONS = {"min": "minimize", "max": "maximize"}
SWEEPER = "hydra.sweeper."


@dataclass
class JobResult:
    """The result of a sweep job, stored as JSON because a launcher may run the job in another process.

    Args:
        overrides: The overrides that differ between jobs, joined by spaces.
        folder: The run's folder; None if the job failed before it was created.
        metric: Name of the main score; None if the job has no score.
        score: The main score.
        lower_is_better: Whether a lower score is better.
        error: Why the job failed.
        interrupted: Whether a signal stopped the job.
    """

    overrides: str
    folder: str | None = None
    metric: str | None = None
    score: float | None = None
    lower_is_better: bool = False
    error: str | None = None
    interrupted: bool = False

    @classmethod
    def read(cls, path: Path) -> "JobResult":
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        write_text(path, json.dumps(asdict(self)))

    @property
    def sort_key(self) -> tuple[bool, bool, bool, str, float]:
        """Orders scored jobs first, best score first, then jobs without score, interrupted jobs and failed jobs."""
        score = math.nan if self.score is None else self.score
        rank = math.inf if math.isnan(score) else score if self.lower_is_better else -score
        return self.error is not None, self.interrupted, self.score is None, self.metric or "", rank

    @property
    def outcome(self) -> str:
        """The score, or why there is none."""
        if self.error is not None:
            return "failed"
        if self.interrupted:
            return "stopped"
        return "none" if self.score is None else f"{self.metric} {self.score:.4f}"

    @property
    def resume_arguments(self) -> list[str]:
        """The arguments that resume the run; empty if it has no checkpoint."""
        has_checkpoint = self.folder and (Path(self.folder) / "checkpoints" / "last.ckpt").is_file()
        return [f"resume={self.folder}"] if has_checkpoint else []


def folder_suffix(overrides: list[str]) -> str:
    """Returns overrides as the suffix of a folder's name, without special characters of shells and file systems."""
    return re.sub(r"[^\w.,=+-]+", "-", "_".join(overrides), flags=re.ASCII)[:MAX_SUFFIX]


def run_job(
    load_config: Callable[[], Config],
    overrides: list[str],
    result_file: Path,
    use_validation_score: bool = False,
) -> int:
    """Trains a job of a sweep in its own folder, or resumes it after a SLURM requeue, and stores its result.

    Args:
        load_config: Returns the job's config.
        overrides: The overrides that differ between jobs.
        result_file: The file for the result.
        use_validation_score: Report the best validation score instead of the test score. Required for sweepers that
            optimize it, so that the test split selects nothing.
    Returns:
        The exit status.
    """
    result = JobResult(overrides=" ".join(overrides))
    try:
        config, suffix = load_config(), folder_suffix(overrides)
        requeued = find_requeued_run(config, suffix)
        folder = requeued or Path(broadcast_choice(lambda: str(create_run_folder(config, suffix))))
        result.folder = str(folder)
        status = resume_run(str(folder), []) if requeued else train(config, folder=folder)
        if status >= 128:
            result.interrupted = True
        elif status:
            result.error = f"exited with status {status}"
        else:
            _add_main_score(result, config, folder, use_validation_score)
    except KeyboardInterrupt:
        result.interrupted = True
        raise
    except BaseException as fault:
        result.error = (str(fault) or type(fault).__name__).split("\n")[0]
        raise
    finally:
        if is_rank_zero():
            result.write(result_file)
    return status


def _add_main_score(result: JobResult, config: Config, folder: Path, use_validation_score: bool) -> None:
    """Adds a run's main test score to its result, or its best validation score if the run has no test."""
    task = cast(type["Task"], find(config["task"]["_target_"]))
    files = [folder / "evaluation" / split / "metrics.json" for split in ("test", "val")]
    path = next((path for path in files if path.is_file() and not use_validation_score), None)
    if path is None:
        from vlm.checkpoint import load as ckpt

        checkpoints = config["callbacks"]["checkpoints"]
        scores = ckpt.read(folder)["vlm"]["scores"]
        name, lower_is_better = str(checkpoints["monitor"]), checkpoints["mode"] == "min"
    else:
        scores = json.loads(path.read_text(encoding="utf-8"))
        split = next(iter(scores)).split("/")[0]
        metric = next(name for name in (*task.headlines, "loss") if f"{split}/{name}" in scores)
        name, lower_is_better = f"{split}/{metric}", metric in task.smaller_is_better
    if name in scores:
        result.metric, result.score, result.lower_is_better = name, scores[name], lower_is_better


def read_objective(result_file: Path) -> float | None:
    """Returns the score that Optuna optimizes, or None if the job has no finite score."""
    score = JobResult.read(result_file).score
    return score if score is not None and math.isfinite(score) else None


def format_results(
    result_files: Iterable[Path],
    unfinished_jobs: Sequence[Sequence[str]] = (),
    study: StoppedStudy | None = None,
) -> str:
    """Returns the results of a sweep as a table, best job first, failed jobs last.

    Args:
        result_files: The files with the results, in the order of the jobs.
        unfinished_jobs: The arguments of the jobs that a signal prevented from finishing, the interrupted job first.
        study: The study that a signal stopped; None if none was stopped.
    """
    results = [JobResult.read(path) for path in result_files]
    interrupted = results[-1] if results[-1].interrupted else None
    if unfinished_jobs:
        commands = [(interrupted and interrupted.resume_arguments) or unfinished_jobs[0], *unfinished_jobs[1:]]
        count, more = len(commands) - (interrupted is not None), len(commands) - MAX_COMMANDS
        remaining = ["", f"stopped: {count} job{'s' * (count != 1)} did not run. Continue with:"]
        remaining += [f"  {train_command(*arguments)}" for arguments in commands[:MAX_COMMANDS]]
        remaining += [f"  ... and {more} more"] * (more > 0)
    else:
        remaining = _format_unfinished_study(interrupted, study) if study else []
    results.sort(key=lambda result: result.sort_key)
    columns = align_columns([["overrides", "score"], *([result.overrides, result.outcome] for result in results)])
    folders = ["run", *(printable(result.error or result.folder or "") for result in results)]
    rows = [f"{row}  {folder}".rstrip() for row, folder in zip(columns.split("\n"), folders, strict=True)]
    lines = ["", f"{len(results)} sweep job{'s' * (len(results) > 1)}, best first", *rows]
    if any((result.metric or "").startswith("test/") for result in results):
        lines.append("(the best of several test scores is slightly optimistic; use test=false to rank by validation)")
    return "\n".join([*lines, *remaining])


def _format_unfinished_study(interrupted: JobResult | None, study: StoppedStudy) -> list[str]:
    """Returns the number of unfinished trials of a stopped study, and the command that continues it.

    Args:
        interrupted: The result of the interrupted trial; None if the signal came between two trials.
    """
    lines = ["", f"stopped: {study.remaining} of {study.trials} trials remain."]
    if study.is_stored:
        lines[-1] += (
            f" Continue with the same command{', which replaces the stopped trial' * (interrupted is not None)}:"
        )
        lines.append(f"  {train_command(*study.arguments)}")
    else:
        lines[-1] += " The study is not stored and cannot be continued. To start one that can be continued:"
        storage = "hydra.sweeper.study_name=NAME", "hydra.sweeper.storage=sqlite:///FILE.db"
        lines.append(f"  {train_command(*study.arguments, *storage)}")
    if interrupted and interrupted.resume_arguments:
        lines.append("To resume the run of the stopped trial, outside of the study:")
        lines.append(f"  {train_command(*interrupted.resume_arguments)}")
    return lines


def begin_study(sweeper: StudySettings, config: Config, typed: list[str], result_folder: Path) -> list[str]:
    """Starts an Optuna study, or continues the stored study of this name. Prints the metric and the finished trials.

    Args:
        sweeper: Settings of Hydra's Optuna sweeper.
        config: The config that the trials share.
        typed: Keys that the command line sets, in its order.
        result_folder: Folder for the results of earlier trials.
    Returns:
        Further overrides of the sweeper: the direction, the number of remaining trials, and one job at a time, so that
        each trial uses the scores of all earlier ones.
    Raises:
        UserError: The study has another metric or direction, or its storage cannot be used.
    """
    checkpoints = config["callbacks"].get("checkpoints") or {}
    metric, direction = checkpoints.get("monitor"), OPTUNA_DIRECTIONS[checkpoints.get("mode", "min")]
    if not metric:
        raise UserError(
            "callbacks.checkpoints.monitor: set it to the metric that Optuna should optimize, such as val/loss"
        )
    if f"{SWEEPER}direction" in typed and sweeper["direction"] != direction:
        raise UserError(f"{SWEEPER}direction: {metric} must be {direction}d; leave the override out")
    print(f"Optuna optimizes {metric} ({direction})", file=sys.stderr)
    overrides: dict[str, str | int] = {"direction": direction} | ({} if f"{SWEEPER}n_jobs" in typed else {"n_jobs": 1})
    if sweeper["storage"]:
        trials = _load_trials(sweeper, metric, direction)
        for number, trial in enumerate(trials):
            result = _trial_result(trial, config, typed)
            result.metric, result.lower_is_better = metric, direction == "minimize"
            result.write(result_folder / f"before-{number:06}.json")
        finished = sum(trial.state.is_finished() for trial in trials)
        overrides["n_trials"] = max(sweeper["n_trials"] - finished, 0)
        print(f"study {sweeper['study_name']}: {finished} of {sweeper['n_trials']} trials finished", file=sys.stderr)
        seed = sweeper["sampler"].get("seed")
        if seed is not None:  # the same seed would draw the same values again
            overrides["sampler.seed"] = seed + len(trials)
    return [f"{SWEEPER}{key}={value}" for key, value in overrides.items()]


def _load_trials(sweeper: StudySettings, metric: str, direction: str) -> list["FrozenTrial"]:
    """Returns the trials of a stored study, which is created if it is new."""
    import optuna

    if not sweeper["study_name"]:
        raise UserError(f"{SWEEPER}study_name: missing; a stored study needs a name to be continued")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(
            storage=sweeper["storage"], study_name=sweeper["study_name"], direction=direction, load_if_exists=True
        )
        objective = f"{metric}, to {direction}"  # as earlier versions stored it
        stored = study.user_attrs.get("metric")
        if stored is None:
            study.set_user_attr("metric", objective)
        elif stored != objective:
            raise UserError(
                f"{SWEEPER}study_name: study {sweeper['study_name']} optimizes {_format_objective(stored)}, not "
                f"{_format_objective(objective)}; use another study_name"
            )
        return study.trials
    except UserError:
        raise
    except Exception as fault:  # SQLAlchemy raises many types, and its version 2 breaks optuna's storage
        reason = (str(fault) or type(fault).__name__).split("\n")[0]
        remedy = 'sqlite:///FILE.db needs pip install "vlm-lightning[optuna]"'
        raise UserError(f"{SWEEPER}storage: {printable(str(sweeper['storage']))}: {reason}; {remedy}") from fault


def _format_objective(stored: str) -> str:
    """Formats a study's attribute "METRIC, to DIRECTION" as "METRIC (DIRECTION)"."""
    metric, _, direction = stored.rpartition(", to ")
    return f"{metric} ({direction})"


def _trial_result(trial: "FrozenTrial", config: Config, typed: list[str]) -> JobResult:
    """Returns an earlier trial's result as `run_job` stored it, with the overrides in command-line order."""
    names = sorted(trial.params, key=lambda name: typed.index(name) if name in typed else len(typed))
    overrides = [f"{name}={trial.params[name]}" for name in names]
    runs, suffix = Path(config["runs"]) / config["name"], folder_suffix(overrides)
    folders = sorted(path for path in runs.glob("*") if path.name[len(TIMESTAMP) :].lstrip("_") == suffix)
    result = JobResult(" ".join(overrides), folder=str(folders[-1]) if folders else "?", score=trial.value)
    if trial.value is None:
        if trial.state.is_finished():
            result.error = f"failed: {result.folder}"
        else:
            result.interrupted = True
    return result
