"""The commands that use a model: each task's own, `vlm predict` for any, and `vlm info`."""

import importlib
from collections.abc import Callable
from typing import Annotated

from vlm.inference.commands import Command
from vlm.inference.options import Checkpoint, ModelOptions, Option


def command_of(command: Command) -> Callable[..., int]:
    """The function of a task's command; its module imports torch."""
    return importlib.import_module(command.module).command


def predict(
    inputs: Annotated[list[str], Option("Images, or prompts for a language model.", positional=True)],
    model: ModelOptions,
) -> int:
    """Use a model of any task, also of your own package (--trust): what its own command does by default."""
    from vlm.inference.output import Output, Records
    from vlm.inference.predictor import predictor_of

    kind = predictor_of(model.checkpoint, trust=model.trust)
    chosen = kind.inputs(inputs)
    output = Output(model.out, inputs=[*chosen, model.checkpoint])
    records = Records(form=model.form, fields=kind.fields, output=output)
    predictor = model.load(kind)
    with output:
        return predictor.predict(chosen, records, batch_size=model.batch_size)


def info(checkpoint: Checkpoint) -> int:
    """Show the contents of a checkpoint: task, model, tokenizer, data, step and scores."""
    from vlm.inference.info import describe

    print(describe(checkpoint))
    return 0
