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
from vlm.training.run.output import tolerate_broken_pipes
from vlm.training.run.processes import broadcast_choice
from vlm.training.run.resume import find_checkpoint, resume_run
from vlm.training.run.run_folder import create_run_folder
from vlm.training.run.sweep import begin_study, format_results, read_objective, run_job
from vlm.training.run.train import train
from vlm.tuning import tune


def main(argv: list[str] | None = None) -> int:
    """Runs `train.py` with these arguments, by default those of the process, and returns the exit status."""
    tune()
    argv = sys.argv[1:] if argv is None else argv
    with tolerate_broken_pipes():
        try:
            _refuse_trust_option(argv)
            where, overrides = split_option(argv, "resume")
            if where is not None:
                return resume_run(where, overrides)
            return run(
                train_or_resume, overrides, check, sweep=Sweep(run_job, format_results, read_objective, begin_study)
            )
        except UserError as fault:
            return report(fault)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def _refuse_trust_option(argv: Sequence[str]) -> None:
    """Suggests trust=PACKAGE instead of --trust PACKAGE, the form of all other commands.

    Raises:
        UserError: The arguments contain --trust.
    """
    for index, text in enumerate(argv):
        option, _, value = text.partition("=")
        if option == "--trust":
            value = value or next(iter(argv[index + 1 : index + 2]), "PACKAGE")
            raise UserError(f"--trust: training takes options as KEY=VALUE; use trust={value} instead")


def fit(overrides: Sequence[str]) -> Path:
    """Trains or resumes a run in this process and returns its folder.

    Raises:
        UserError: The config or the data are invalid, or the machine fails.
        KeyboardInterrupt: A signal stopped the run.
    """
    where, overrides_to_apply = split_option(list(overrides), "resume")
    if where is not None:
        folder = find_checkpoint(where).parent.parent
        status = resume_run(where, overrides_to_apply)
    else:
        config = compose(overrides_to_apply, check)
        config.typed = overrides_to_apply
        folder = Path(broadcast_choice(lambda: str(create_run_folder(config))))
        status = train(config, folder=folder)
    if status:
        raise KeyboardInterrupt
    return folder


def train_or_resume(config: Config) -> int:
    """Trains a config, or resumes the run of `resume` or of a requeued SLURM job. Returns the exit status."""
    run_to_resume = config.get("resume") or slurm.find_requeued_run(config)
    return train(config) if run_to_resume is None else resume_run(str(run_to_resume), [])
