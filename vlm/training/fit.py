"""The command line of training: a new run, or one to go on with."""

import signal
import sys
from typing import Any

from vlm.config.command import report, run
from vlm.config.target import trust
from vlm.errors import UserError
from vlm.training import slurm
from vlm.training.check import check, check_suited
from vlm.training.output import readers_may_leave
from vlm.training.overrides import split_option
from vlm.training.pretrained import spell_out
from vlm.training.resume import resume_run
from vlm.training.train import train
from vlm.tuning import tune


def main(argv: list[str] | None = None) -> int:
    """Runs `train.py` with these arguments and returns the exit status."""
    tune()
    argv = sys.argv[1:] if argv is None else argv
    with readers_may_leave():
        try:
            package, argv = split_option(argv, "trust")
            if package:
                trust(package)
            resume, overrides = split_option(argv)
            if resume is not None:
                return resume_run(resume, overrides)
            return run(start, spell_out(overrides), check, check_suited)
        except UserError as fault:
            return report(fault)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def start(config: dict[str, Any]) -> int:
    """Trains as the config says, or goes on with the run that a requeued job began; returns the exit status."""
    begun = slurm.begun(config)
    return train(config) if begun is None else resume_run(str(begun), [])
