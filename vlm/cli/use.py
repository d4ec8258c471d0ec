"""The commands that use a model: each task's own, and `vlm predict` for any. torch is imported when they run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

from vlm.errors import UserError
from vlm.inference.options import ModelOptions, Option, OutputOptions, check_checkpoint, declared, hints_of
from vlm.inference.tasks import TASKS, Command, misused, resolve, task_name, tasks_of

if TYPE_CHECKING:
    from vlm.inference.predictor import Predictor

Words = Annotated[
    list[str] | None,
    Option("Images, texts or files, as the model reads them; a model of texts reads lines of stdin.", positional=True),
]


def command_of(name: str) -> Callable[..., int]:
    """The function of a task's command; torch is imported only when it runs.

    If several tasks share the name, it has the options of all; the checkpoint's task decides which apply.
    """
    commands = tasks_of(name)
    first = next(iter(commands.values()))
    if first.function is not None:
        return resolve(first.function)
    if len(commands) > 1:
        return _shared(commands)

    def run(arguments: Any, model: ModelOptions, output: OutputOptions, options: Any) -> int:
        return use(resolve(first.predictor), arguments, model, output, options)

    run.__annotations__ |= {"arguments": first.arguments, "options": first.options}
    return run


def predict_of(argv: Sequence[str]) -> Callable[..., int]:
    """Returns the function of `vlm predict`, with the options of all tasks, and of a user's task that `argv` names."""
    commands = {task: entry.main for task, entry in TASKS.items()}
    checkpoint, trust = option_value(argv, "-c", "--checkpoint"), option_value(argv, "--trust")
    if checkpoint is not None and trust is not None:
        check_checkpoint(checkpoint)
        from vlm.inference.predictor import predictor_of

        kind = predictor_of(checkpoint, trust=trust)
        path = f"{kind.__module__}:{kind.__qualname__}"
        commands.setdefault(kind.task, Command("predict", "", path, kind.options, kind.arguments))
    return _shared(commands, any_task=True)


def option_value(argv: Sequence[str], *names: str) -> str | None:
    """Returns the value of an option in a command line."""
    for place, word in enumerate(argv):
        for name in names:
            if word == name:
                return next(iter(argv[place + 1 :]), None)
            if word.startswith(f"{name}=") or (len(name) == 2 and word.startswith(name)):
                return word.removeprefix(name).removeprefix("=")
    return None


def _shared(commands: Mapping[str, Command], *, any_task: bool = False) -> Callable[..., int]:
    """Returns a command of several tasks, with the options of all.

    Args:
        commands: The command of each task.
        any_task: Whether its arguments are words that each task reads in its own way.
    """
    options = _merged("Options", [command.options for command in commands.values()])
    named = make_dataclass("Arguments", [("inputs", Words, field(default=None))], kw_only=True)
    arguments = named if any_task else _merged("Arguments", [command.arguments for command in commands.values()])

    def run(arguments: Any, model: ModelOptions, output: OutputOptions, options: Any) -> int:
        from vlm.checkpoint.load import read
        from vlm.checkpoint.rebuild import refusing
        from vlm.inference.predictor import predictor_of

        loaded = model.load(lambda path, dtype, **others: read(path, dtype=dtype))
        with refusing(model.checkpoint):
            task = task_name(loaded["vlm"]["task"])
        if task not in commands and not any_task:
            raise misused(model.checkpoint, task, *commands)
        known = task in TASKS
        kind = (
            resolve(commands[task].predictor) if known else predictor_of(model.checkpoint, trust=model.trust, task=task)
        )
        own = _own(kind.options, options, task)
        words = kind.arguments.of(arguments.inputs or []) if any_task else _own(kind.arguments, arguments, task)
        return use(kind, words, model, output, own, loaded=loaded)

    run.__annotations__ |= {"arguments": arguments, "options": options}
    return run


def _merged(name: str, kinds: Sequence[type]) -> type:
    """Returns a dataclass with the fields of several; required fields become optional, since other tasks lack them."""
    merged: dict[str, tuple[str, Any, Any]] = {}
    for kind in kinds:
        hints = hints_of(kind)
        for one in fields(kind):
            default = None if one.default is MISSING else one.default
            merged.setdefault(one.name, (one.name, hints[one.name], field(default=default)))
    return make_dataclass(name, merged.values(), kw_only=True)


def _own(kind: type, given: Any, task: str) -> Any:
    """Selects a task's options from those of all tasks that share its command.

    Raises:
        UserError: A required option is missing, or one of another task is set.
    """
    known, everything = declared(kind), declared(type(given))
    values = vars(given)
    for one in fields(kind):
        if one.default is MISSING and not values[one.name]:
            raise UserError(f"{_typed(one.name, everything)}: missing; a model for {task} needs it")
    for one in fields(given):
        if one.name not in known and values[one.name] and values[one.name] != one.default:
            raise UserError(f"{_typed(one.name, everything)}: a model for {task} takes none; leave it out")
    return kind(**{name: values[name] for name in known})


def _typed(name: str, options: Mapping[str, Option]) -> str:
    """Returns the name of a field on the command line."""
    return name.upper() if options[name].positional else f"--{name.replace('_', '-')}"


def use(
    kind: type["Predictor"],
    arguments: Any,
    model: ModelOptions,
    output: OutputOptions,
    options: Any,
    *,
    loaded: Mapping[str, Any] | None = None,
) -> int:
    """Uses a model as a command says; returns the exit status.

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
