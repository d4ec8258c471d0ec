"""The `vlm` command. torch is imported only inside a command."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from vlm import __version__
from vlm.cli import data, doctor, evaluate, pretrained, train, use
from vlm.cli.options import as_typer
from vlm.errors import UserError, is_out_of_memory, print_error
from vlm.inference.tasks import TASKS
from vlm.tuning import tune

PREDICT = "Use a model of any task, also of your own package (--trust): what the command of its task does."
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def app(argv: Sequence[str]) -> typer.Typer:
    """The command line; of the tasks' commands, only the one that is called is imported."""
    program = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    program.callback()(_root)
    program.command("train", help="Train a model: vlm train [OVERRIDES], the same as python train.py.")(
        as_typer(train.train)
    )
    program.command()(as_typer(train.bench))
    for name, help in {one.name: one.help for task in TASKS.values() for one in task.commands}.items():
        function = as_typer(use.command_of(name)) if name in argv[:1] else lambda: None
        program.command(name, help=help)(function)
    predict = as_typer(use.predict_of(argv)) if "predict" in argv[:1] else lambda: None
    program.command("predict", help=PREDICT)(predict)
    for function in (use.serve, use.demo, evaluate.evaluate, use.info, evaluate.score, evaluate.compare):
        program.command(function.__name__)(as_typer(function))
    program.command()(as_typer(doctor.doctor))
    program.command("check-data")(as_typer(data.check_data))
    program.command("shard")(as_typer(data.shard))
    program.command("import")(as_typer(pretrained.import_folder))
    program.command("export")(as_typer(pretrained.export))
    return program


def _tell(version: bool) -> None:
    if version:
        print(f"vlm {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_tell)
    ] = False,
) -> None:
    """Train, evaluate and use small vision-language models."""


def _typed() -> Sequence[str]:
    """The words of the command line that a shell asks to complete; none if none does."""
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
    return line.split()[1:] if "_VLM_COMPLETE" in os.environ else []


def main() -> None:
    """Runs a command; what a user can cause leaves as a line and an exit status, never as a traceback."""
    tune()
    read_any_name()
    if sys.argv[1:2] == ["train"]:
        from vlm.training.run.fit import main as fit

        sys.exit(fit(sys.argv[2:]))
    sys.exit(run(sys.argv[1:] or _typed()))


def run(argv: Sequence[str]) -> int:
    """Runs a command in this process; returns its exit status."""
    return _report(lambda: app(argv)(list(argv), standalone_mode=False))


def read_any_name() -> None:
    """Lets file names through that are no UTF-8: read as Python has them in paths, printed escaped.

    A byte order mark, with which some programs begin UTF-8, is no part of the text on stdin.
    """
    if isinstance(sys.stdin, TextIOWrapper):
        is_utf8 = sys.stdin.encoding.lower() == "utf-8"
        sys.stdin.reconfigure(encoding="utf-8-sig" if is_utf8 else None, errors="surrogateescape")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _report(command: Callable[[], int | None]) -> int:
    # typer has a copy of click of its own in newer versions; its exceptions are reached through typer.
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except UserError as fault:
        if os.environ.get("VLM_DEBUG") == "1":
            raise
        print_error(fault)
        return fault.status
    except usage_error as fault:
        if reason := fault.format_message():  # type: ignore[attr-defined]
            print_error(f"{reason} (see vlm --help)")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        _forget_stdout()
        return 0
    except (OSError, MemoryError, RuntimeError) as fault:
        if is_out_of_memory(fault):
            print_error("out of memory; lower --batch-size, --beam or --results, or give less at a time")
            return 1
        if not isinstance(fault, OSError) or fault.errno not in FULL:
            raise
        _forget_stdout()
        print_error(f"{fault.filename or 'stdout'}: cannot be written ({fault.strerror}); free space, or use another")
        return 1


def _forget_stdout() -> None:
    """Has Python not try again at its end to write what could not be."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
