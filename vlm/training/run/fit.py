"""The command line of training, for new and resumed runs."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vlm.config.command import Sweep, report, run
from vlm.config.compose import compose
from vlm.config.tree import Config
from vlm.errors import UserError
from vlm.training.config.check import check
from vlm.training.config.overrides import split_option
from vlm.training.run import run_folder as slurm
from vlm.training.run.output import readers_may_leave
from vlm.training.run.processes import broadcast_choice
from vlm.training.run.resume import find, resume_run
from vlm.training.run.run_folder import new_folder
from vlm.training.run.sweep import begin_study, closing, run_job, told
from vlm.training.run.train import train
from vlm.tuning import tune


def main(argv: list[str] | None = None) -> int:
    """Runs `train.py` with these arguments and returns the exit status."""
    tune()
    argv = sys.argv[1:] if argv is None else argv
    with readers_may_leave():
        try:
            _refuse_trust_option(argv)
            where, overrides = split_option(argv, "resume")
            if where is not None:
                return resume_run(where, overrides)
            return run(start, overrides, check, sweep=Sweep(run_job, closing, told, begin_study))
        except UserError as fault:
            return report(fault)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def _refuse_trust_option(argv: Sequence[str]) -> None:
    """Names the form of training for an option that all other commands have.

    Raises:
        UserError: The arguments hold --trust.
    """
    for place, text in enumerate(argv):
        option, _, value = text.partition("=")
        if option == "--trust":
            value = value or next(iter(argv[place + 1 : place + 2]), "PACKAGE")
            raise UserError(f"--trust: training takes values as KEY=VALUE; give trust={value} in its place")


def fit(overrides: Sequence[str]) -> Path:
    """Trains or resumes a run in this process, as the overrides say; returns its folder.

    Raises:
        UserError: The config, the data or the machine is at fault.
        KeyboardInterrupt: A signal stopped the run.
    """
    where, left = split_option(list(overrides), "resume")
    if where is not None:
        folder = find(where).parent.parent
        status = resume_run(where, left)
    else:
        config = compose(left, check)
        config.typed = left
        folder = Path(broadcast_choice(lambda: str(new_folder(config))))
        status = train(config, folder=folder)
    if status:
        raise KeyboardInterrupt
    return folder


def start(config: Config) -> int:
    """Trains as the config says, or resumes the run of `resume` or of the requeued job; returns the exit status."""
    begun = config.get("resume") or slurm.begun(config)
    return train(config) if begun is None else resume_run(str(begun), [])
