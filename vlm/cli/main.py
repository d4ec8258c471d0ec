"""The `vlm` command. torch is imported only when a command runs, so that errors and --help appear at once."""

import errno
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from vlm import __version__
from vlm.errors import UserError, is_out_of_memory, print_error, unknown_choice
from vlm.inference.tasks import TASKS, import_object
from vlm.machine import tune

if TYPE_CHECKING:
    from vlm.inference.options import Option

PREDICT = "Run a model of any task, including tasks of other packages (--trust), like the command of its task."
TRAIN = "Train a model: vlm train [OVERRIDES], the same as python train.py."
# What to give if an argument is missing, by command.
MISSING_ARGUMENT = {
    "vlm score": "; give results and references: vlm score results.json annotations.json or, with one text per line, "
    "vlm score hypotheses.txt references.txt"
}
TEXT_ONLY_DECODING = {
    "generate",
    "translate",
    "chat",
}  # commands that decode without loading images at the same time
# Commands other than those of tasks: the function of each, imported when it is called, and its help.
COMMANDS = {
    "bench": (
        "vlm.cli.bench:bench",
        "Time training steps of a config.",
    ),
    "serve": ("vlm.serving.serve:serve", "Serve a model over HTTP: POST /predict, /health, /metrics, /openapi.json."),
    "demo": ("vlm.serving.demo:demo", "Try a model of any task on a web page."),
    "evaluate": (
        "vlm.cli.checkpoint_commands:evaluate",
        "Evaluate a checkpoint on a split of its data, and compare it with baselines.",
    ),
    "info": (
        "vlm.cli.checkpoint_commands:info",
        "Show the contents of a checkpoint: task, model, tokenizer, data, step and scores.",
    ),
    "score": (
        "vlm.cli.score_commands:score",
        "Score captions as COCO's evaluation does (BLEU, ROUGE-L, CIDEr). Needs two files and no checkpoint.",
    ),
    "compare": (
        "vlm.cli.score_commands:compare",
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
        "Export a checkpoint to Hugging Face, safetensors, GGUF, ONNX or torch.export format.",
    ),
}
_SERVER = {"fastapi", "h11", "python_multipart", "starlette", "uvicorn"}
EXTRAS = {"serve": _SERVER, "demo": _SERVER | {"gradio"}}  # packages of the extra with a command's name
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def build_app(argv: Sequence[str]) -> typer.Typer:
    """Returns the command-line application; only the called command is imported."""
    # Plain help, because rich's frames waste half of 80 columns and truncate long options.
    program = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
    program.callback()(_main_options)
    helps = {"train": TRAIN} | {command.name: command.help for task in TASKS.values() for command in task.commands}
    helps |= {"predict": PREDICT} | {name: help for name, (_, help) in COMMANDS.items()}
    for name, help in helps.items():
        called = name in argv[:1] and name != "train"  # Hydra parses its overrides: see `run`
        # short_help=help, because the default is truncated to one line.
        add = program.command(name, help=help, short_help=help)
        if not called:
            add(lambda: None)
        elif name in COMMANDS:
            add(to_typer_command(import_object(COMMANDS[name][0])))
        else:
            from vlm.cli import use  # not needed by `vlm --help`

            add(to_typer_command(use.make_predict_command(argv) if name == "predict" else use.make_command(name)))
    return program


METAVARS = {
    "N": int,
    "X": float,
    "TEXT": str,
    " ": bool,
}  # short names of types in --help, which leave room for the text


def to_typer_command(command: Callable[..., int]) -> Callable[..., int]:
    """Returns a function with a command's options for typer; the fields of a dataclass parameter become options."""
    groups = {name: kind for name, kind in get_type_hints(command).items() if is_dataclass(kind)}
    declared = list(_list_options(command))
    options = {name: get_args(hint)[1] for name, hint, _ in declared}

    def run(**values: Any) -> int:
        _check_values(options, values)
        for name, value in values.items():
            if value is not None and (convert := options[name].convert) is not None:
                values[name] = convert(value)
        parts = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})  # type: ignore[operator]
            for name, kind in groups.items()
        }
        return command(**values, **parts)

    parameters = sorted(
        (_make_parameter(*option) for option in declared),
        key=lambda parameter: parameter.default is not inspect.Parameter.empty,
    )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _check_values(options: "Mapping[str, Option]", values: Mapping[str, Any]) -> None:
    """Checks the values of a command line, whose names and types typer has checked, before the command runs.

    Raises:
        UserError: A value is not one of its choices, or the check of an option refuses it.
    """
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if (choices := options[name].choices) and value not in choices:
            flag = options[name].flags[-1] if options[name].flags else f"--{name}"
            raise unknown_choice(flag, value, choices)
    for name, value in given.items():
        if (check := options[name].check) is not None:
            check(value)


def _list_options(command: Callable[..., int]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, the annotated type and the default of each option."""
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if not is_dataclass(kind):
            yield name, kind, parameter.default
            continue
        inner = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield field.name, inner[field.name], default


def _make_parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    kind: Any
    option: Option
    kind, option = get_args(hint)
    kind = kind if option.cli_type is None else option.cli_type
    if option.positional:
        argument: Any = typer.Argument(help=option.help, metavar=option.metavar or name.upper())
    else:
        metavar = option.metavar or next(
            name for name, type_of_metavar in METAVARS.items() if type_of_metavar in _nested_types(kind)
        )
        argument = typer.Option(*option.flags, help=option.help, metavar=metavar, min=option.least, max=option.most)
    annotation = Annotated[kind, argument]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _nested_types(hint: Any) -> list[Any]:
    """Returns a type and all types inside it."""
    return [hint, *(inner for part in get_args(hint) for inner in _nested_types(part))]


def _print_version(version: bool) -> None:
    if version:
        print(f"vlm {__version__}")
        raise typer.Exit


def _main_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Train, evaluate and use small vision-language models."""


def main() -> None:
    """Runs a command; errors that a user can cause give one line and an exit status, not a traceback."""
    tune(single_threaded=not TEXT_ONLY_DECODING.isdisjoint(sys.argv[1:2]))
    accept_any_file_name()
    completes = "_VLM_COMPLETE" in os.environ  # a shell completes the words of a command line
    line = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS") or ""
    sys.exit(run(sys.argv[1:] or (line.split()[1:] if completes else [])))


def run(argv: Sequence[str]) -> int:
    """Runs a command in this process; returns its exit status."""
    if argv[:1] == ["train"] and "_VLM_COMPLETE" not in os.environ:
        return import_object("vlm.training.run.fit:main")(list(argv[1:]))

    def command() -> int | None:
        try:
            return build_app(argv)(list(argv), prog_name="vlm", standalone_mode=False)
        except ModuleNotFoundError as fault:
            package = (fault.name or "").partition(".")[0]
            if package not in EXTRAS.get("".join(argv[:1]), ()):
                raise
            raise UserError(f'vlm {argv[0]}: needs {package}; pip install "vlm-lightning[{argv[0]}]"') from fault

    return _run_with_exit_status(command)


def accept_any_file_name() -> None:
    """Accepts file names that are not UTF-8: they are read with surrogate escapes, and printed escaped.

    A byte order mark is removed from stdin, and only a line feed ends a line.
    """
    if isinstance(sys.stdin, TextIOWrapper):
        is_utf8 = sys.stdin.encoding.lower() == "utf-8"
        sys.stdin.reconfigure(encoding="utf-8-sig" if is_utf8 else None, errors="surrogateescape", newline="\n")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run_with_exit_status(command: Callable[[], int | None]) -> int:
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
        if type(fault).__name__ == "NoArgsIsHelpError":  # the message is the help text
            print(reason, file=sys.stderr)
        elif reason:
            command_path = fault.ctx.command_path if fault.ctx else "vlm"  # type: ignore[attr-defined]
            example = MISSING_ARGUMENT.get(command_path, "") if reason.startswith("Missing argument") else ""
            print_error(f"{reason.rstrip('.')}{example} (see {command_path} --help)")
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # the reader of the output has closed it
        _discard_stdout()
        return 0
    except (OSError, MemoryError, RuntimeError) as fault:
        if is_out_of_memory(fault):
            print_error("out of memory; lower --batch-size, --beam or --results, or give fewer inputs")
            return 1
        if not isinstance(fault, OSError) or fault.errno not in WRITE_ERRORS:
            raise
        _discard_stdout()
        reason = f"cannot be written ({fault.strerror})"
        print_error(f"{fault.filename or 'stdout'}: {reason}; free disk space, or choose another file")
        return 1


def _discard_stdout() -> None:
    """Redirects stdout to the null device, so that Python does not fail to flush it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
