"""The command line of training, for new and resumed runs; it tolerates `python train.py | head`."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

from vlm.config.command import Sweep, report, run
from vlm.config.compose import compose
from vlm.config.tree import Config
from vlm.errors import UserError
from vlm.machine import tune
from vlm.training.config.check import check
from vlm.training.config.nodes import split_option
from vlm.training.run.processes import broadcast_choice
from vlm.training.run.run_folder import create_run_folder, find_requeued_run
from vlm.training.run.sweep import begin_study, format_results, read_objective, run_job
from vlm.training.run.train import find_checkpoint, resume_run, train


class PipedOutput:
    """A text stream that discards its output once the reader of the pipe has exited.

    Args:
        stream: The wrapped stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._run(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        self._run(self._stream.flush)

    def _run(self, action: Callable[[], int | None]) -> int | None:
        """Runs an action; on a broken pipe, redirects the stream to the null device."""
        try:
            return action()
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
            return None


@contextmanager
def tolerate_broken_pipes() -> Iterator[None]:
    """Context in which a broken pipe of stdout or stderr does not end the training."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, PipedOutput(before[0])), cast(TextIO, PipedOutput(before[1]))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def main(argv: list[str] | None = None) -> int:
    """Runs `train.py` with these arguments, by default those of the process, and returns the exit status."""
    tune()
    argv = sys.argv[1:] if argv is None else argv
    with tolerate_broken_pipes():
        try:
            for index, text in enumerate(argv):  # --trust PACKAGE is the form of all other commands
                option, _, value = text.partition("=")
                if option == "--trust":
                    value = value or next(iter(argv[index + 1 : index + 2]), "PACKAGE")
                    raise UserError(f"--trust: training takes options as KEY=VALUE; use trust={value} instead")
            where, overrides = split_option(argv, "resume")
            if where is not None:
                return resume_run(where, overrides)
            sweep = Sweep(run_job, format_results, read_objective, begin_study)
            return run(train_or_resume, overrides, check, sweep=sweep)
        except UserError as fault:
            return report(fault)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT


def fit(overrides: Sequence[str]) -> Path:
    """Trains or resumes a run in this process and returns its folder.

    Raises:
        UserError: The config or the data are invalid, or the machine fails.
        KeyboardInterrupt: A signal stopped the run.
    """
    where, run_overrides = split_option(list(overrides), "resume")
    if where is not None:
        folder = find_checkpoint(where).parent.parent
        status = resume_run(where, run_overrides)
    else:
        config = compose(run_overrides, check)
        config.typed = run_overrides
        folder = Path(broadcast_choice(lambda: str(create_run_folder(config))))
        status = train(config, folder=folder)
    if status:
        raise KeyboardInterrupt
    return folder


def train_or_resume(config: Config) -> int:
    """Trains a config, or resumes the run of `resume` or of a requeued SLURM job. Returns the exit status."""
    interrupted = config.get("resume") or find_requeued_run(config)
    return train(config) if interrupted is None else resume_run(str(interrupted), [])
