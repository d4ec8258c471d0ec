"""The `vlm` command. torch is imported only when a command runs, so that errors and --help appear at once."""

import errno
import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import click

from vlm import __version__
from vlm.errors import UserError, is_out_of_memory, print_error, unknown_choice
from vlm.inference.tasks import TASKS, import_object
from vlm.machine import tune

if TYPE_CHECKING:
    from vlm.inference.options import Option

DESCRIPTION = "Train, evaluate and use small vision-language models."
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
    "average": (
        "vlm.cli.checkpoint_commands:average",
        "Average the weights of several checkpoints of one model (a model soup) into one checkpoint file.",
    ),
    "export": (
        "vlm.cli.checkpoint_commands:export",
        "Export a checkpoint to Hugging Face, safetensors, GGUF, ONNX or torch.export format.",
    ),
}
_SERVER = {"fastapi", "h11", "python_multipart", "starlette", "uvicorn"}
EXTRAS = {"serve": _SERVER, "demo": _SERVER | {"gradio"}}  # packages of the extra with a command's name
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Program(click.Group):
    """The program, whose help lists the commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def build_program(argv: Sequence[str]) -> Program:
    """Returns the command-line program; only the called command is imported."""
    program = Program("vlm", help=DESCRIPTION, no_args_is_help=True, context_settings={"max_content_width": 80})
    show_version = click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_print_version,
        help="Print the version.",
    )
    program.params.append(show_version)
    helps = {"train": TRAIN} | {command.name: command.help for task in TASKS.values() for command in task.commands}
    helps |= {"predict": PREDICT} | {name: help for name, (_, help) in COMMANDS.items()}
    for name, help in helps.items():
        called = name in argv[:1] and name != "train"  # Hydra parses its overrides: see `run`
        if not called:
            command = None
        elif name in COMMANDS:
            command = import_object(COMMANDS[name][0])
        else:
            from vlm.cli import use  # not needed by `vlm --help`

            command = use.make_predict_command(argv) if name == "predict" else use.make_command(name)
        program.add_command(make_click_command(name, help, command))
    return program


RANGES = {int: click.IntRange, float: click.FloatRange}
METAVARS = {int: "N", float: "X", str: "TEXT"}  # short names of types in --help, which leave room for the text


def make_click_command(name: str, help: str, command: Callable[..., int] | None) -> click.Command:
    """Returns a command of the program; the fields of dataclass parameters become options.

    Args:
        command: The function that it runs; None if only its name and help are needed.
    """
    if command is None:
        return click.Command(name, help=help, short_help=help)
    groups = {name: kind for name, kind in get_type_hints(command).items() if is_dataclass(kind)}
    declared = list(_list_options(command))
    options = {name: get_args(hint)[1] for name, hint, _ in declared}
    defaults = {name: default for name, _, default in declared}

    def run(**values: Any) -> int:
        for name, value in values.items():
            if isinstance(value, tuple):  # an option that may be repeated; without values, it is empty
                values[name] = list(value) or defaults[name]
        _check_values(options, values)
        for name, value in values.items():
            if value is not None and (convert := options[name].convert) is not None:
                values[name] = convert(value)
        parts = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})  # type: ignore[operator]
            for name, kind in groups.items()
        }
        return command(**values, **parts)

    parameters = sorted((_make_parameter(*option) for option in declared), key=lambda one: not one.required)
    return click.Command(name, callback=run, params=parameters, help=help, short_help=help)


def _check_values(options: "Mapping[str, Option]", values: Mapping[str, Any]) -> None:
    """Checks the values of a command line, whose names and types click has checked, before the command runs.

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


def _make_parameter(name: str, hint: Any, default: Any) -> click.Parameter:
    option: Option
    kind, option = get_args(hint)
    kinds = _nested_types(kind if option.cli_type is None else option.cli_type)
    settings: dict[str, Any] = {"help": option.help}
    settings |= {"required": True} if default is inspect.Parameter.empty else {"default": default}
    if option.positional:
        metavar = option.metavar or name.upper()
        metavar += "..." if list in kinds else ""
        metavar = metavar if "required" in settings else f"[{metavar}]"
        return click.Argument([name], nargs=-1 if list in kinds else 1, metavar=metavar, **settings)
    flag = f"--{name.replace('_', '-')}"
    if bool in kinds:
        flags = option.flags or (f"{flag}/--no-{flag[2:]}",)
        return click.Option([name, *flags], is_flag=True, show_default="/" in flags[-1], **settings)
    value_type = next(kind for kind in METAVARS if kind in kinds)
    bounded = option.least is not None or option.most is not None
    return click.Option(
        [name, *(option.flags or (flag,))],
        type=RANGES[value_type](option.least, option.most) if bounded else value_type,
        multiple=list in kinds,
        show_default=default != "",
        metavar=option.metavar or METAVARS[value_type],
        **settings,
    )


def _nested_types(hint: Any) -> list[Any]:
    """Returns a type, the types inside it, and the generic types that they belong to."""
    return [hint, get_origin(hint), *(inner for part in get_args(hint) for inner in _nested_types(part))]


def _print_version(context: click.Context, parameter: click.Parameter, version: bool) -> None:
    if version:
        print(f"vlm {__version__}")
        context.exit()


def main() -> None:
    """Runs a command; errors that a user can cause give one line and an exit status, not a traceback."""
    tune(single_threaded=not TEXT_ONLY_DECODING.isdisjoint(sys.argv[1:2]))
    accept_any_file_name()
    completes = "_VLM_COMPLETE" in os.environ  # a shell completes the words of a command line
    line = os.environ.get("COMP_WORDS", "") if completes else ""
    status = run(sys.argv[1:] or line.split()[1:])
    # Else Python searches all objects for cyclic garbage before it exits. A training's loggers may leave files for that
    # collection to close, and triton reports what is not collected.
    if sys.argv[1:2] != ["train"] and "triton" not in sys.modules:
        gc.freeze()
    sys.exit(status)


def run(argv: Sequence[str]) -> int:
    """Runs a command in this process; returns its exit status."""
    if argv[:1] == ["train"] and "_VLM_COMPLETE" not in os.environ:
        return import_object("vlm.training.run.fit:main")(list(argv[1:]))

    def command() -> int | None:
        try:
            return build_program(argv).main(list(argv), prog_name="vlm", standalone_mode=False)
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
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except UserError as fault:
        if os.environ.get("VLM_DEBUG") == "1":
            raise
        print_error(fault)
        return fault.status
    except click.exceptions.NoArgsIsHelpError as fault:
        print(fault.format_message(), file=sys.stderr)
        return 2
    except click.UsageError as fault:
        reason = fault.format_message()
        command_path = fault.ctx.command_path if fault.ctx else "vlm"
        example = MISSING_ARGUMENT.get(command_path, "") if reason.startswith("Missing argument") else ""
        print_error(f"{reason.rstrip('.')}{example} (see {command_path} --help)")
        return 2
    except (click.Abort, KeyboardInterrupt):
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
