"""The commands that use a model: each task's own, `vlm predict` for any, and `vlm info`."""

import importlib
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from typing import Annotated

from vlm.inference.commands import Command
from vlm.inference.options import Checkpoint, ModelOptions, Option


def command_of(shared: Sequence[Command], arguments: Sequence[str]) -> Callable[..., int]:
    """The function of a command; its module imports torch.

    Args:
        shared: The tasks' commands of this name; of several, the one of the checkpoint's task is meant.
        arguments: Those of the command line.
    """
    command = shared[0]
    if len(shared) > 1 and (path := _checkpoint(arguments)) is not None:
        from vlm.inference.predictor import task_of

        held = task_of(path)
        command = next((one for one in shared if one.task == held), command)
    return importlib.import_module(command.module).command


def _checkpoint(arguments: Sequence[str]) -> str | None:
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("-c", "--checkpoint", nargs="?")
    return parser.parse_known_args(arguments)[0].checkpoint


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
