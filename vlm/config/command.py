"""Hydra's command line: a run of one config, or Hydra's own machinery for sweeps, ``--cfg`` and ``--help``.

Hydra creates no folder and no log of its own. Its errors become UserErrors: a line or two that name the key, and exit
status 2.
"""

import io
import os
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from vlm.config.compose import ROOT, VERSION, Check, Composed, bare_word_remedy, compose, composed, conf_dir, explained
from vlm.config.override import parse, quote
from vlm.config.tree import Config
from vlm.config.untrusted import readable
from vlm.errors import UserError, print_error

Main = Callable[[Config], int | None]


class StoppedStudy(NamedTuple):
    """A study of which a signal stopped a trial.

    Args:
        arguments: The arguments of its command line.
        trials: Number of trials in all.
        left: Number of trials that did not end, with the stopped one.
        is_stored: Whether the same command continues it.
    """

    arguments: list[str]
    trials: int
    left: int
    is_stored: bool


class Sweep(NamedTuple):
    """The functions that run the jobs of a sweep and summarise them.

    Args:
        run: Runs one job. Arguments: a function that returns its config, the overrides that differ between jobs, the
            path of its record, and whether the sweeper is told the score.
        closing: Returns the last lines of the sweep, from the paths of the jobs' records, the arguments of the jobs
            that a signal kept from ending, the stopped one first, and the study that a signal stopped, if any.
        score: Returns the score that the sweeper is told of a successful job, from the path of its record.
        study: Begins or continues a study; returns further overrides of the sweeper. Arguments: the sweeper's settings,
            the config, the keys on the command line, and the folder of the records.
    """

    run: Callable[[Callable[[], Config], list[str], Path, bool], int | None]
    closing: Callable[[list[Path], list[list[str]], StoppedStudy | None], str]
    score: Callable[[Path], float | None]
    study: Callable[[dict[str, Any], Config, list[str], Path], list[str]]


_PLACES = ("config_path", "config_name", "config_dir")
_NO_LOGGING = "{version: 1, root: null}"
_RESUME = "resume=RUN goes on with a run: its folder, one of its checkpoints, or last for the newest under runs/."
# A run has its own folder and log, so Hydra must leave nothing behind.
_OURS = (
    "hydra.run.dir=.",
    "hydra.sweep.subdir=.",
    "hydra.output_subdir=null",
    "hydra.job.name=train",
    "hydra.job.chdir=false",
    f"++hydra.job_logging={_NO_LOGGING}",
    f"++hydra.hydra_logging={_NO_LOGGING}",
    f"hydra.help.footer='{_RESUME}'",
)


def run(main: Main, argv: list[str], check: Check | None = None, *, sweep: Sweep | None = None) -> int:
    """Runs ``main`` with the config of a command line in Hydra's form; once for each job of a sweep.

    Args:
        main: Takes the config, resolved to plain containers, and returns its exit status, or None for 0.
        argv: The command line, without the program's name.
        check: As in ``compose``.
        sweep: Runs the jobs of a sweep instead of ``main``, and prints its last lines.
    Returns:
        The exit status, for a sweep the highest one; 2 if the config or the command line is at fault.
    """

    def job() -> int | None:
        options = _parse(argv)
        flags = {name for name, value in vars(options).items() if value} - {*_PLACES, "overrides", "run"}
        if flags or any(text.lstrip("+~").startswith(("hydra.", "hydra/")) for text in options.overrides):
            return _run_hydra(main, options, check, prefix=_prefix(argv), sweep=sweep)
        config = compose(options.overrides, check, options)
        config.typed = argv
        return main(config)

    return _status(job)


def report(fault: UserError) -> int:
    """Prints a fault for the user and returns its exit status; with VLM_DEBUG=1, a traceback too."""
    if os.environ.get("VLM_DEBUG") == "1":
        traceback.print_exception(fault)
    print_error(fault)
    return fault.status


def _run_hydra(main: Main, options: Namespace, check: Check | None, *, prefix: list[str], sweep: Sweep | None) -> int:
    sweeps = options.multirun or "hydra.mode=MULTIRUN" in options.overrides
    statuses: list[int] = []
    process, typed = os.getpid(), sys.argv

    def job(config: DictConfig) -> float | None:
        own = HydraConfig.get()
        learns = own.runtime.choices["hydra/sweeper"] != "basic"
        record = Path(scratch) / (f"job-{own.job.num:06}.json" if sweeps else "job.json")  # num is set in sweeps only
        command, line = typed, [*_flags(options, *_PLACES), *own.overrides.task]
        if sweeps:
            # Lightning starts this command for each further device: it must run this job, not the sweep.
            command = [*prefix, *line]
            print(f"job {own.job.num}: {' '.join(own.overrides.task)}", file=sys.stderr)

        def whole() -> Config:
            own_config = Composed(config, [], []).config(check)
            own_config.typed = line
            return own_config

        HydraConfig.instance().cfg = None  # if it is set, Lightning starts further processes in another way
        with _argv(command):
            if sweeps and sweep:
                differing = [text for text in own.overrides.task if text not in common]
                status = _status(lambda: sweep.run(whole, differing, record, learns))
            else:
                status = _status(lambda: main(whole()))
        statuses.append(status)
        if status >= 128:  # a signal ends the whole sweep
            raise SystemExit(status)
        if status and os.getpid() != process:  # in a launcher's process, `statuses` is a copy
            raise UserError(f"job {own.job.num} ended with status {status}", status)
        return sweep.score(record) if sweeps and sweep and learns and not status else None

    with ExitStack() as stack:
        stack.callback(setattr, HydraConfig.instance(), "cfg", None)
        stack.enter_context(explained(options))
        stack.enter_context(readable(options.overrides))
        first = composed(options, options.overrides, sweeps)
        if first.faults:
            first.config(check)
        common = {_single(text) for text in first.overrides}
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="vlm-sweep-"))
        ours = [*_OURS, quote(f"hydra.sweep.dir={scratch}")]
        if "HYDRA_FULL_ERROR" not in os.environ:
            os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, rather than print and exit
            stack.callback(os.environ.pop, "HYDRA_FULL_ERROR")
        line, study = [*ours, *first.overrides], None
        if sweep and "n_trials" in first.sweeper and sweeps:
            typed = [text.partition("=")[0] for text in first.overrides]
            further = sweep.study(first.sweeper, first.config(None), typed, Path(scratch))
            line, trials = [*line, *further], first.sweeper["n_trials"]
            left = next((int(text.rpartition("=")[2]) for text in further if "sweeper.n_trials=" in text), trials)
            study = StoppedStudy([*_flags(options), *options.overrides], trials, left, bool(first.sweeper["storage"]))
        stack.enter_context(_argv([prefix[0], *_flags(options), *line]))
        printed = stack.enter_context(redirect_stderr(io.StringIO())) if options.cfg else io.StringIO()
        interrupted = False  # between two jobs
        try:
            hydra.main(str(conf_dir()), ROOT, VERSION)(job)()
        except KeyboardInterrupt:
            interrupted = True
            raise
        except SystemExit as exit:
            if exit.code and not statuses:
                raise UserError(printed.getvalue().strip() or "Hydra gave up on this command line") from None
        except ValueError:
            if not statuses or not all(statuses):
                raise
            # Optuna's plugin asks for the best trial, which raises if all failed.
        finally:
            if sweep and (records := sorted(Path(scratch).glob("*.json"))):
                ended = sum(status < 128 for status in statuses)
                stopped = sweeps and (interrupted or ended < len(statuses))
                jobs = _jobs(options)[ended:] if stopped and not study else []
                study = study._replace(left=study.left - ended) if stopped and study else None
                print(sweep.closing(records, jobs, study), flush=True)
    return max(statuses, default=0)


def _jobs(options: Namespace) -> list[list[str]]:
    """Returns the arguments of each job of a sweep over all combinations, in their order."""
    parsed = OverridesParser.create().parse_overrides([quote(text, sweeping=True) for text in options.overrides])
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    flags = _flags(options, *_PLACES)
    return [[*flags, *(text for text in job if not text.lstrip("+").startswith("hydra"))] for job in jobs]


def _single(text: str) -> str:
    """Returns an override as Hydra passes it to each job of a sweep; one with several values is unchanged."""
    override = parse(text)
    if override is None or override.is_sweep_override() or override.is_delete():
        return text
    return f"{override.get_key_element()}={override.get_value_element_as_str()}"


@contextmanager
def _argv(argv: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


def _status(job: Callable[[], int | None]) -> int:
    """The exit status of a job; catches every exception."""
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


def _parse(argv: list[str]) -> Namespace:
    """Parses Hydra's flags and the overrides, in any order."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            options = get_args_parser().parse_intermixed_args(argv)
    except SystemExit as exit:
        if not exit.code:
            raise
        reason = printed.getvalue().strip().rpartition("error: ")[2]
        raise UserError(f"{reason}; values are given as KEY=VALUE, such as trainer.max_epochs=5") from None
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


def _flags(options: Namespace, *names: str) -> list[str]:
    """Converts parsed flags back to arguments: those named, or all."""
    chosen = {name: getattr(options, name) for name in names} if names else vars(options)
    flags = []
    for name, value in chosen.items():
        if value and name != "overrides":
            flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return flags


def _prefix(argv: list[str]) -> list[str]:
    """Returns the words before the arguments: the program, and the name of its command."""
    before = len(sys.argv) - len(argv)
    return sys.argv[:before] if before > 0 and sys.argv[before:] == argv else sys.argv[:1]
