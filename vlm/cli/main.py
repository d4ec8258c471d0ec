"""The `vlm` command. torch is imported only when a command runs, so that mistakes and --help take no seconds."""

import errno
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from vlm import __version__
from vlm.cli import use
from vlm.cli.options import as_typer
from vlm.errors import UserError, is_out_of_memory, print_error
from vlm.inference.tasks import TASKS, resolve
from vlm.tuning import tune

PREDICT = "Run a model of any task, also one from your own package (--trust), like the command of its task."
TRAIN = "Train a model: vlm train [OVERRIDES], the same as python train.py."
# What to write where an argument is missing, by command.
MISSING_ARGUMENT = {
    "vlm score": "; give results and references: vlm score results.json annotations.json, or, with a text per line, "
    "vlm score hypotheses.txt references.txt"
}
DECODING = {"generate", "translate", "chat"}  # commands that decode texts without reading photos at the same time
# Commands other than those of tasks: the function of each, imported when it is called, and its help.
COMMANDS = {
    "bench": (
        "vlm.cli.bench:bench",
        "Time training steps of any config, as vlm train would take them.",
    ),
    "serve": ("vlm.serving.serve:serve", "Serve a model over HTTP: POST /predict, /health, /metrics, /openapi.json."),
    "demo": ("vlm.serving.demo:demo", "Try a model of any task on a page in the browser."),
    "evaluate": (
        "vlm.cli.checkpoint_commands:evaluate",
        "Evaluate a checkpoint on a split of its data, with the controls any model should beat.",
    ),
    "info": (
        "vlm.cli.checkpoint_commands:info",
        "Show the contents of a checkpoint: task, model, tokenizer, data, step and scores.",
    ),
    "score": (
        "vlm.cli.score:score",
        "Score captions as COCO's evaluation does: BLEU, ROUGE-L and CIDEr of any two files; needs no checkpoint.",
    ),
    "compare": (
        "vlm.cli.compare:compare",
        "Compare evaluations side by side, with paired bootstrap significance against the first.",
    ),
    "doctor": (
        "vlm.cli.doctor:doctor",
        "Print hardware, versions, chosen defaults and missing packages, for bug reports.",
    ),
    "check-data": (
        "vlm.cli.data_commands:check_data",
        "Validate a data set before training. Exits with status 1 if it finds a problem that would invalidate a run.",
    ),
    "shard": (
        "vlm.cli.data_commands:shard",
        "Write an image data set as WebDataset shards with checksums; data=webdataset reads them in place.",
    ),
    "import": (
        "vlm.cli.checkpoint_commands:import_folder",
        "Convert a Hugging Face folder, or adapters and their base model, to a single checkpoint file.",
    ),
    "export": (
        "vlm.cli.checkpoint_commands:export",
        "Export a checkpoint to Hugging Face, safetensors, ONNX or torch.export format.",
    ),
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def app(argv: Sequence[str]) -> typer.Typer:
    """The command line; only the command that is called is imported."""
    # Plain help, because rich's frames leave half of 80 columns for the text and cut off long options.
    program = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    program.callback()(_root)
    helps = {"train": TRAIN} | {one.name: one.help for task in TASKS.values() for one in task.commands}
    helps |= {"predict": PREDICT} | {name: help for name, (_, help) in COMMANDS.items()}
    for name, help in helps.items():
        called = name in argv[:1] and name != "train"  # Hydra parses its overrides: see `run`
        # A short help is not cut to one line.
        program.command(name, help=help, short_help=help)(as_typer(_function(name, argv)) if called else lambda: None)
    return program


def _function(name: str, argv: Sequence[str]) -> Callable[..., int]:
    """The function of a command."""
    if name in COMMANDS:
        return resolve(COMMANDS[name][0])
    return use.predict_of(argv) if name == "predict" else use.command_of(name)


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
    """Returns the words of a command line that a shell asks to complete; empty if none does."""
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
    return line.split()[1:] if "_VLM_COMPLETE" in os.environ else []


def main() -> None:
    """Runs a command; faults that a user can cause end in a line and an exit status, never in a traceback."""
    tune(alone=not DECODING.isdisjoint(sys.argv[1:2]))
    read_any_name()
    sys.exit(run(sys.argv[1:] or _typed()))


def run(argv: Sequence[str]) -> int:
    """Runs a command in this process; returns its exit status."""
    if argv[:1] == ["train"] and "_VLM_COMPLETE" not in os.environ:
        return resolve("vlm.training.run.fit:main")(list(argv[1:]))

    return _report(lambda: app(argv)(list(argv), prog_name="vlm", standalone_mode=False))


def read_any_name() -> None:
    """Accepts file names that are not UTF-8: they are read as Python represents them in paths, and printed escaped.

    A byte order mark, which some programs put before UTF-8, is removed from stdin, and only a line feed ends a line.
    """
    if isinstance(sys.stdin, TextIOWrapper):
        is_utf8 = sys.stdin.encoding.lower() == "utf-8"
        sys.stdin.reconfigure(encoding="utf-8-sig" if is_utf8 else None, errors="surrogateescape", newline="\n")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _report(command: Callable[[], int | None]) -> int:
    # Newer versions of typer contain their own copy of click, whose exceptions are reached through typer.
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
        reason = fault.format_message()  # type: ignore[attr-defined]
        if type(fault).__name__ == "NoArgsIsHelpError":  # its message is the help
            print(reason, file=sys.stderr)
        elif reason:
            typed = fault.ctx.command_path if fault.ctx else "vlm"  # type: ignore[attr-defined]
            example = MISSING_ARGUMENT.get(typed, "") if reason.startswith("Missing argument") else ""
            print_error(f"{reason.rstrip('.')}{example} (see {typed} --help)")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader of the output has closed it
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
    """Keeps Python from trying at exit to write again what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
