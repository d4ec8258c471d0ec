"""Studies, `python train.py -m hydra/sweeper=optuna KEY=interval(LOW,HIGH)`: optuna chooses the values of each trial.

A trial's value is the best score of callbacks.checkpoints.monitor, which also selects its checkpoint.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vlm.errors import UserError, printable
from vlm.io.atomic import write_text
from vlm.training.run.sweep import folders_of

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
