"""The commands that run a model: those of the tasks, and `vlm predict`. torch is imported when they run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

from vlm.checkpoint.locate import check_checkpoint
from vlm.errors import UserError
from vlm.inference.arguments import Arguments, LineArguments, check_readable
from vlm.inference.options import (
    ModelOptions,
    Option,
    Options,
    OutputOptions,
    as_list,
    cached_type_hints,
    get_options,
)
from vlm.inference.tasks import (
    TASKS,
    Command,
    commands_by_task,
    import_object,
    object_path,
    wrong_task_error,
)
from vlm.machine import paused_collection

if TYPE_CHECKING:
    from vlm.checkpoint.stored import Checkpoint
    from vlm.inference.predictor import Predictor

Words = Annotated[
    list[str] | None,
    Option("Images, texts or files, as the model reads them. By default, texts are lines of stdin.", positional=True),
]


def make_command(name: str) -> Callable[..., int]:
    """Returns the function of a task's command; torch is imported only when it runs.

    If several tasks have this command, it has the options of all; the checkpoint's task decides which apply.
    """
    commands = commands_by_task(name)
    first = next(iter(commands.values()))
    if first.function is not None:
        return import_object(first.function)
    if len(commands) > 1:
        return _make_shared_command(commands)

    def run(arguments: Arguments, model: ModelOptions, output: OutputOptions, options: Options) -> int:
        _check_files(arguments, options)
        with paused_collection():
            kind = import_object(first.predictor)
        return run_predictor(kind, arguments, model, output, options)

    run.__annotations__ |= {"arguments": import_object(first.arguments), "options": import_object(first.options)}
    return run


def make_predict_command(argv: Sequence[str]) -> Callable[..., int]:
    """Returns the function of `vlm predict`, with the options of all tasks and of the checkpoint in `argv`."""
    commands = {task: entry.main for task, entry in TASKS.items()}
    checkpoint, trust = find_option_value(argv, "-c", "--checkpoint"), find_option_value(argv, "--trust")
    if checkpoint is not None and trust is not None:
        check_checkpoint(checkpoint)
        from vlm.inference.predictor import find_predictor_class

        kind = find_predictor_class(checkpoint, trust=trust)
        paths = map(object_path, (kind, kind.options, kind.arguments))
        commands.setdefault(kind.task, Command("predict", "", *paths))
    return _make_shared_command(commands, any_task=True)


def find_option_value(argv: Sequence[str], *names: str) -> str | None:
    """Returns the value of an option in a command line."""
    for place, word in enumerate(argv):
        for name in names:
            if word == name:
                return next(iter(argv[place + 1 :]), None)
            if word.startswith(f"{name}=") or (len(name) == 2 and word.startswith(name)):
                return word.removeprefix(name).removeprefix("=")
    return None


def _make_shared_command(commands: Mapping[str, Command], *, any_task: bool = False) -> Callable[..., int]:
    """Returns a command of several tasks, with the options of all.

    Args:
        commands: The command of each task.
        any_task: Whether it is `vlm predict`, whose arguments are words that the task interprets.
    """
    options = _merge_dataclasses("Options", [import_object(command.options) for command in commands.values()])
    named = make_dataclass("Arguments", [("inputs", Words, field(default=None))], kw_only=True)
    classes = [import_object(command.arguments) for command in commands.values()]
    arguments = named if any_task else _merge_dataclasses("Arguments", classes)

    def run(arguments: Any, model: ModelOptions, output: OutputOptions, options: Any) -> int:
        _check_files(arguments, options, status=2 if set(classes) == {LineArguments} else 1)
        import torch

        from vlm.checkpoint.load import read
        from vlm.inference.predictor import find_predictor_class, task_of

        loaded = model.load(lambda path, dtype, int8, **options: read(path, dtype=torch.qint8 if int8 else dtype))
        task = task_of(model.checkpoint, loaded)
        if task not in commands and not any_task:
            raise wrong_task_error(model.checkpoint, task, *commands)
        is_builtin_task = task in TASKS
        kind = (
            import_object(commands[task].predictor)
            if is_builtin_task
            else find_predictor_class(model.checkpoint, trust=model.trust, task=task)
        )
        task_options = _select_options(kind.options, options, task)
        if any_task:
            words = kind.arguments.from_words(arguments.inputs or [])
        else:
            words = _select_options(kind.arguments, arguments, task)
        return run_predictor(kind, words, model, output, task_options, loaded=loaded)

    run.__annotations__ |= {"arguments": arguments, "options": options}
    return run


def _check_files(arguments: Any, options: Any, *, status: int = 1) -> None:
    """Checks that the files of a command exist before its checkpoint is read, whose task may decide on their use.

    Args:
        status: The exit status if no input can be read.
    """
    values = vars(arguments) | vars(options)
    for name, status_of_option in (("images", 1), ("files", status), ("image", 1), ("labels", 2)):
        check_readable(as_list(values.get(name) or []), status=status_of_option)


def _merge_dataclasses(name: str, kinds: Sequence[type]) -> type:
    """Returns a dataclass with the fields of several; required fields become optional, for tasks without them."""
    merged: dict[str, tuple[str, Any, Any]] = {}
    for kind in kinds:
        hints = cached_type_hints(kind)
        for option in fields(kind):
            default = None if option.default is MISSING else option.default
            merged.setdefault(option.name, (option.name, hints[option.name], field(default=default)))
    return make_dataclass(name, merged.values(), kw_only=True)


def _select_options(kind: type, given: Any, task: str) -> Any:
    """Selects a task's options from those of all tasks that share its command.

    Raises:
        UserError: A required option is missing, or an option of another task is set.
    """
    task_options, all_options = get_options(kind), get_options(type(given))
    values = vars(given)
    for option in fields(kind):
        if option.default is MISSING and not values[option.name]:
            raise UserError(f"{_name_on_command_line(option.name, all_options)}: missing; a model for {task} needs it")
    for option in fields(given):
        if option.name not in task_options and values[option.name] and values[option.name] != option.default:
            raise UserError(
                f"{_name_on_command_line(option.name, all_options)}: not supported by a model for {task}; remove it"
            )
    return kind(**{name: values[name] for name in task_options})


def _name_on_command_line(name: str, options: Mapping[str, Option]) -> str:
    """Returns the name of a field on the command line."""
    return name.upper() if options[name].positional else f"--{name.replace('_', '-')}"


def run_predictor(
    kind: type["Predictor"],
    arguments: Arguments,
    model: ModelOptions,
    output: OutputOptions,
    options: Options,
    *,
    loaded: "Checkpoint | None" = None,
) -> int:
    """Runs the predictor of a command and writes its results; returns the exit status.

    Args:
        loaded: The content of the checkpoint, if it has been read.
    """
    from vlm.inference.use import write_results
    from vlm.inference.writing import Trace
    from vlm.io.output import Output

    inputs = arguments.read()
    read = [*arguments.paths(inputs), *options.files(), model.checkpoint]
    out = Output(output.out, inputs=read)
    records = kind.records(output.form, out, options)
    predictor = model.load(kind, loaded=loaded)
    predictor.check_options(options)
    trace = Trace(getattr(options, "trace", None), predictor, options, inputs=read, out=output.out)
    with out, records, trace:
        return write_results(predictor, inputs, options, records, trees=trace.trees)
