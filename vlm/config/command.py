"""Hydra's command line: runs a config, or calls Hydra for sweeps, ``--cfg`` and ``--help``.

Hydra must not create folders or log files. Its errors are converted to UserErrors of a line or two that name the key,
with exit status 2.
"""

import io
import os
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import NamedTuple, TypedDict

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from vlm.config.compose import (
    ROOT,
    VERSION,
    Check,
    Composition,
    bare_word_remedy,
    compose,
    compose_tree,
    conf_dir,
    explain_hydra_errors,
)
from vlm.config.override import parse, quote
from vlm.config.tree import Config
from vlm.config.untrusted import allow_environment
from vlm.errors import UserError, print_error

Main = Callable[[Config], int | None]


class StudySettings(TypedDict):
    """Settings of Hydra's Optuna sweeper."""

    direction: str
    n_jobs: int
    n_trials: int
    sampler: dict[str, int | None]
    storage: str | None
    study_name: str | None


class StoppedStudy(NamedTuple):
    """An Optuna study that a signal stopped.

    Args:
        arguments: The arguments of its command line.
        trials: Total number of trials.
        remaining: Number of unfinished trials, including the stopped one.
        is_stored: Whether the same command continues the study.
    """

    arguments: list[str]
    trials: int
    remaining: int
    is_stored: bool


class Sweep(NamedTuple):
    """The functions that run the jobs of a sweep and format its results; see `vlm.training.run.sweep`.

    Args:
        run_job: Runs a job. Arguments: a function that returns its config, the overrides that differ between jobs, the
            file for its result, and whether the sweeper optimizes the score.
        format_results: Formats the results. Arguments: the result files, the arguments of the jobs that a signal
            prevented from finishing, the interrupted job first, and the study that a signal stopped, if any.
        read_objective: Returns the score that the sweeper optimizes, from the result file of a successful job.
        begin_study: Starts or continues a study and returns further overrides of the sweeper. Arguments: the sweeper's
            settings, the config, the keys on the command line, and the folder of the result files.
    """

    run_job: Callable[[Callable[[], Config], list[str], Path, bool], int | None]
    format_results: Callable[[list[Path], list[list[str]], StoppedStudy | None], str]
    read_objective: Callable[[Path], float | None]
    begin_study: Callable[[StudySettings, Config, list[str], Path], list[str]]


_CONFIG_FLAGS = ("config_path", "config_name", "config_dir")
_NO_LOGGING = "{version: 1, root: null}"
_RESUME_HELP = "resume=RUN resumes a run: its folder, one of its checkpoints, or last for the newest run under runs/."
# Runs have their own folders and logs, so Hydra must not create any.
_HYDRA_SETTINGS = (
    "hydra.run.dir=.",
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra.job.name=train",
    "hydra.job.chdir=false",
    f"++hydra.job_logging={_NO_LOGGING}",
    f"++hydra.hydra_logging={_NO_LOGGING}",
    f"hydra.help.footer='{_RESUME_HELP}'",
)


def run(main: Main, argv: list[str], check: Check | None = None, *, sweep: Sweep | None = None) -> int:
    """Runs ``main`` with the config of a Hydra command line, or runs the jobs of a sweep.

    Args:
        main: Takes the resolved config and returns an exit status, or None for 0.
        argv: The command line without the program's name.
        check: As in ``compose``.
        sweep: Functions for sweeps; None to run ``main`` for each job.
    Returns:
        The exit status, for a sweep the highest one; 2 if the config or the command line is invalid.
    """

    def job() -> int | None:
        options = _parse_command_line(argv)
        flags = {name for name, value in vars(options).items() if value} - {*_CONFIG_FLAGS, "overrides", "run"}
        if flags or any(text.lstrip("+~").startswith(("hydra.", "hydra/")) for text in options.overrides):
            before = len(sys.argv) - len(argv)
            is_suffix = before > 0 and sys.argv[before:] == argv
            prefix = sys.argv[:before] if is_suffix else sys.argv[:1]  # the program and the name of its command
            return _HydraCommand(main, options, check, prefix, sweep).run()
        config = compose(options.overrides, check, options)
        config.typed = argv
        return main(config)

    return _run_to_status(job)


def report(fault: UserError) -> int:
    """Prints an error and returns its exit status. With VLM_DEBUG=1, also prints the traceback."""
    if os.environ.get("VLM_DEBUG") == "1":
        traceback.print_exception(fault)
    print_error(fault)
    return fault.status


class _HydraCommand:
    """A command line that Hydra runs: a sweep, or one job with a flag or a setting of Hydra.

    Launchers may pickle it to run a job in another process.

    Args:
        main, check: As in `run`.
        options: The parsed command line.
        prefix: The program and the name of its command.
        sweep: As in `run`; unused without a sweep.
    """

    def __init__(self, main: Main, options: Namespace, check: Check | None, prefix: list[str], sweep: Sweep | None):
        self.main, self.options, self.check, self.prefix = main, options, check, prefix
        self.is_sweep = options.multirun or "hydra.mode=MULTIRUN" in options.overrides
        self.sweep = sweep if self.is_sweep else None
        self.process, self.argv = os.getpid(), sys.argv
        self.statuses: list[int] = []  # of the jobs that ended
        self.study: StoppedStudy | None = None

    def run(self) -> int:
        """Runs Hydra and returns the highest exit status of its jobs."""
        options = self.options
        with ExitStack() as stack:
            stack.callback(setattr, HydraConfig.instance(), "cfg", None)
            stack.enter_context(explain_hydra_errors(options))
            stack.enter_context(allow_environment(options.overrides))
            first = compose_tree(options, options.overrides, self.is_sweep)
            if first.faults:
                first.config(self.check)
            self.shared_overrides = {_format_as_job(text) for text in first.overrides}
            self.scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vlm-sweep-")))
            if "HYDRA_FULL_ERROR" not in os.environ:
                os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, rather than print and exit
                stack.callback(os.environ.pop, "HYDRA_FULL_ERROR")
            line = [*_HYDRA_SETTINGS, quote(f"hydra.sweep.dir={self.scratch}"), *first.overrides]
            if self.sweep and "n_trials" in first.sweeper:  # a new or continued study of Optuna
                keys, trials = [text.partition("=")[0] for text in first.overrides], first.sweeper["n_trials"]
                further = self.sweep.begin_study(first.sweeper, first.config(None), keys, self.scratch)
                counts = (int(text.rpartition("=")[2]) for text in further if "sweeper.n_trials=" in text)
                arguments = [*_format_flags(options), *options.overrides]
                is_stored = bool(first.sweeper["storage"])
                self.study = StoppedStudy(arguments, trials, next(counts, trials), is_stored=is_stored)
                line += further
            stack.enter_context(_replace_argv([self.prefix[0], *_format_flags(options), *line]))
            self._run_jobs()
        return max(self.statuses, default=0)

    def _run_jobs(self) -> None:
        """Runs Hydra with the present `sys.argv`; prints the results of a sweep, also if it is interrupted."""
        printed = io.StringIO()
        interrupted = False  # between two jobs
        try:
            with redirect_stderr(printed) if self.options.cfg else nullcontext():
                hydra.main(str(conf_dir()), ROOT, VERSION)(self._run_job)()
        except KeyboardInterrupt:
            interrupted = True
            raise
        except SystemExit as exit:
            if exit.code and not self.statuses:
                raise UserError(printed.getvalue().strip() or "Hydra rejected this command line") from None
        except ValueError:
            if not self.statuses or not all(self.statuses):
                raise
            # Optuna's plugin looks up the best trial, which raises if all trials failed.
        finally:
            if self.sweep and (result_files := sorted(self.scratch.glob("*.json"))):
                ended = sum(status < 128 for status in self.statuses)
                stopped = interrupted or ended < len(self.statuses)
                jobs = _list_jobs(self.options)[ended:] if stopped and not self.study else []
                study = self.study._replace(remaining=self.study.remaining - ended) if stopped and self.study else None
                print(self.sweep.format_results(result_files, jobs, study), flush=True)

    def _run_job(self, config: DictConfig) -> float | None:
        """Runs a job that Hydra composed; returns its score if the sweeper optimizes it."""
        hydra_config, sweep = HydraConfig.get(), self.sweep
        overrides = list(hydra_config.overrides.task)
        optimizes = hydra_config.runtime.choices["hydra/sweeper"] != "basic"
        number = hydra_config.job.num if self.is_sweep else 0
        result_file = self.scratch / f"job-{number:06}.json"
        line = [*_format_flags(self.options, *_CONFIG_FLAGS), *overrides]
        if self.is_sweep:
            print(f"job {number}: {' '.join(overrides)}", file=sys.stderr)

        def load_config() -> Config:
            job_config = Composition(config, [], []).config(self.check)
            job_config.typed = line
            return job_config

        def run_job() -> int | None:
            if sweep is None:
                return self.main(load_config())
            differing = [text for text in overrides if text not in self.shared_overrides]
            return sweep.run_job(load_config, differing, result_file, optimizes)

        HydraConfig.instance().cfg = None  # otherwise Lightning starts further processes in another way
        # Lightning runs this command for further devices, so it must run this job instead of the sweep.
        with _replace_argv([*self.prefix, *line] if self.is_sweep else self.argv):
            status = _run_to_status(run_job)
        self.statuses.append(status)
        if status >= 128:  # a signal ends the sweep
            raise SystemExit(status)
        if status and os.getpid() != self.process:  # in a launcher's process, `statuses` is a copy
            raise UserError(f"job {number} exited with status {status}", status)
        return sweep.read_objective(result_file) if sweep and optimizes and not status else None


def _list_jobs(options: Namespace) -> list[list[str]]:
    """Returns the arguments of each job of a sweep over all combinations, in order."""
    parsed = OverridesParser.create().parse_overrides([quote(text, sweeping=True) for text in options.overrides])
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    flags = _format_flags(options, *_CONFIG_FLAGS)
    return [[*flags, *(text for text in job if not text.lstrip("+").startswith("hydra"))] for job in jobs]


def _format_as_job(text: str) -> str:
    """Formats an override as Hydra passes it to the jobs of a sweep; one with several values is unchanged."""
    override = parse(text)
    if override is None or override.is_sweep_override() or override.is_delete():
        return text
    return f"{override.get_key_element()}={override.get_value_element_as_str()}"


@contextmanager
def _replace_argv(argv: list[str]) -> Iterator[None]:
    """Context with another `sys.argv`."""
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


def _run_to_status(job: Callable[[], int | None]) -> int:
    """Runs a job and returns its exit status; catches all exceptions."""
    try:
        return job() or 0
    except UserError as fault:
        return report(fault)
    except KeyboardInterrupt:
        return 130
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except Exception:
        traceback.print_exc()
        return 1


def _parse_command_line(argv: list[str]) -> Namespace:
    """Parses Hydra's flags and the overrides, in any order."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            options = get_args_parser().parse_intermixed_args(argv)
    except SystemExit as exit:
        if not exit.code:
            raise
        reason = printed.getvalue().strip().rpartition("error: ")[2]
        raise UserError(f"{reason}; use the form KEY=VALUE, such as trainer.max_epochs=5") from None
    for text in options.overrides:
        if not text.partition("=")[0].strip("+~ ") or ("=" not in text and not text.startswith("~")):
            remedy = bare_word_remedy(text)
            raise UserError(
                f"{text}: is not of the form KEY=VALUE, such as trainer.max_epochs=5{remedy and f'; {remedy}'}"
            )
    for name in ("config_path", "config_dir"):
        folder = getattr(options, name)
        if folder and "://" not in folder:
            if not os.path.isdir(folder):
                raise UserError(f"--{name.replace('_', '-')} {folder}: no such folder")
            setattr(options, name, os.path.abspath(folder))
    return options


def _format_flags(options: Namespace, *names: str) -> list[str]:
    """Returns the command-line arguments of parsed flags: of these names, or of all."""
    chosen = {name: getattr(options, name) for name in names} if names else vars(options)
    flags = []
    for name, value in chosen.items():
        if value and name != "overrides":
            flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return flags
