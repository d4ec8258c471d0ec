"""The commands that use a model: each task's own, `vlm predict` for any, `vlm serve`, `vlm demo` and `vlm info`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_type_hints

from vlm.errors import UserError
from vlm.inference.options import (
    BatchSize,
    Checkpoint,
    DecodingOptions,
    Device,
    Language,
    ModelOptions,
    Option,
    Precision,
    Trust,
)
from vlm.inference.tasks import commands_of, resolve, tasks_of


def command_of(name: str) -> Callable[..., int]:
    """The function of a task's command; its modules import torch.

    Where several tasks share its name, it has the options of all, and the checkpoint's task says whose function runs.
    """
    functions = {task: resolve(command.function) for task, command in tasks_of(name).items()}
    if len(functions) == 1:
        return functions.popitem()[1]

    def run(model: ModelOptions, **values: Any) -> int:
        from vlm.inference.predictor import task_of

        task = task_of(model.checkpoint)
        if task not in functions:
            other, kinds = commands_of(task)[0], " or ".join(functions)
            raise UserError(f"{model.checkpoint}: holds a model for {task}, not for {kinds}; use `vlm {other}`")
        return functions[task](model=model, **own_values(functions[task], values, task, hints))

    merged: dict[str, inspect.Parameter] = {}
    for function in functions.values():
        merged |= inspect.signature(function).parameters
    for name, parameter in merged.items():
        if parameter.default is inspect.Parameter.empty and name != "model":  # another task does without it
            merged[name] = parameter.replace(default=None)
    hints: dict[str, Any] = {}
    for function in functions.values():
        hints |= get_type_hints(function, include_extras=True)
    keyword = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in merged.values()]
    run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    run.__annotations__ = hints
    return run


def own_values(
    function: Callable[..., int], values: Mapping[str, Any], task: str, hints: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of a function, out of those of all tasks that share its command.

    Args:
        hints: The annotation of each.
    Raises:
        UserError: One that it needs is missing, or one of another task is set.
    """
    known = inspect.signature(function).parameters
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and not values.get(name, True):
            raise UserError(f"{_typed(name, hints[name])}: missing; a model for {task} needs it")
    for name in values:
        if name not in known and values[name]:
            raise UserError(f"{_typed(name, hints[name])}: a model for {task} takes none; leave it out")
    return {name: value for name, value in values.items() if name in known}


def _typed(name: str, hint: Any) -> str:
    """A parameter as the command line has it."""
    _, option = get_args(hint)
    return name.upper() if option.positional else f"--{name.replace('_', '-')}"


def predict(
    inputs: Annotated[list[str], Option("Images, or prompts for a language model.", positional=True)],
    model: ModelOptions,
) -> int:
    """Use a model of any task, also of your own package (--trust): what its own command does by default."""
    from vlm.inference.predictor import predictor_of
    from vlm.io.output import Output, Records

    kind = predictor_of(model.checkpoint, trust=model.trust)
    chosen = kind.inputs(inputs)
    output = Output(model.out, inputs=[*chosen, model.checkpoint])
    records = Records(form=model.form, fields=kind.fields, output=output)
    predictor = model.load(kind)
    with output:
        return predictor.predict(chosen, records, batch_size=model.batch_size)


def serve(
    checkpoint: Checkpoint,
    decoding: DecodingOptions,
    device: Device = "auto",
    precision: Precision = "auto",
    batch_size: BatchSize = 32,
    trust: Trust = None,
    language: Language = None,
    host: Annotated[str, Option("Address to listen on; by default this machine alone reaches it.")] = "127.0.0.1",
    port: Annotated[int, Option("Port to listen on; 0 for any that is free.", least=0, most=65535)] = 8000,
    queue: Annotated[int, Option("Inputs that may wait; more are refused.", least=1)] = 256,
    max_mb: Annotated[int, Option("Megabytes of the largest request.", least=1)] = 32,
    timeout: Annotated[int, Option("Seconds without a new token after which a request ends with 503.", least=1)] = 60,
    allow_origin: Annotated[
        list[str] | None, Option("Origin of web pages that may ask, or *; may be repeated.", metavar="ORIGIN")
    ] = None,
) -> int:
    """Serve a model of images or of texts over HTTP: POST /predict, /health, /metrics, /openapi.json."""
    from vlm.serving.serve import serve

    model = ModelOptions(checkpoint=checkpoint, device=device, precision=precision, batch_size=batch_size, trust=trust)
    limits: Any = {"queue": queue, "max_mb": max_mb, "timeout": timeout, "allow_origin": allow_origin or ()}
    return serve(model, decoding, language=language, host=host, port=port, **limits)


def demo(
    checkpoint: Checkpoint,
    device: Device = "auto",
    precision: Precision = "auto",
    trust: Trust = None,
    host: Annotated[str, Option("Address to listen on; by default this machine alone reaches it.")] = "127.0.0.1",
    port: Annotated[int, Option("Port to listen on; 0 for any that is free.", least=0, most=65535)] = 7860,
    queue: Annotated[int, Option("Requests that may wait; more are refused.", least=1)] = 16,
    max_mb: Annotated[int, Option("Megabytes of the largest photo.", least=1)] = 16,
    rate: Annotated[int, Option("Requests that a client may send in a minute.", least=1)] = 120,
) -> int:
    """Try a model of any task on a page in the browser."""
    from vlm.serving.demo import demo

    model = ModelOptions(checkpoint=checkpoint, device=device, precision=precision, batch_size=1, trust=trust)
    return demo(model, host=host, port=port, queue=queue, max_mb=max_mb, rate=rate)


def info(checkpoint: Checkpoint) -> int:
    """Show the contents of a checkpoint: task, model, tokenizer, data, step and scores."""
    from vlm.inference.info import describe

    print(describe(checkpoint))
    return 0
