"""`vlm evaluate`, `vlm info`, `vlm import` and `vlm export`. torch is imported only when they run."""

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

from vlm.checkpoint.locate import join_places
from vlm.errors import UserError, print_error, printable, printable_lines
from vlm.inference.arguments import check_readable
from vlm.inference.options import (
    Adapters,
    Checkpoint,
    Device,
    Option,
    Overrides,
    Projector,
    Trust,
)

if TYPE_CHECKING:
    from vlm.config.tree import Config
    from vlm.training.step.task import Task


def evaluate(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    split: Annotated[
        str | None, Option("train, val or test; by default test, else val.", choices=("train", "val", "test"))
    ] = None,
    out: Annotated[str | None, Option("Output folder for metrics.json and the predictions.", metavar="DIR")] = None,
    device: Device = "auto",
    batch_size: Annotated[int | None, Option("Number of inputs in a batch.", least=1)] = None,
    trust: Trust = None,
    pairs: Annotated[
        str | None,
        Option(
            "Table of minimal pairs (columns good, bad). Reports how often the model scores the good sentence higher.",
            metavar="FILE",
        ),
    ] = None,
    mmproj: Projector = None,
    adapters: Adapters = None,
) -> int:
    """Evaluates a checkpoint, prints its scores and those of controls, and writes them to `out`.

    Unreadable samples are skipped and named.

    Returns:
        The exit status: 1 if more samples are unreadable than training accepts.

    Raises:
        UserError: As `evaluate_checkpoint` or `evaluate_pairs`; or `out` holds another evaluation.
    """
    check_readable([] if pairs is None else [pairs], status=2)
    from vlm.checkpoint.load import locate
    from vlm.evaluation.report.evaluation import check_no_results
    from vlm.io.output import output_folder
    from vlm.io.terminal import PIPE_WIDTH, fold
    from vlm.training.run.evaluate import evaluate_checkpoint
    from vlm.training.run.run import save_results

    checkpoint = join_places(checkpoint, mmproj=mmproj, adapters=adapters)
    with ExitStack() as stack:
        folder = None if out is None else output_folder(out)
        if folder is not None:
            check_no_results(folder)
        if pairs is not None:
            from vlm.training.run.minimal_pairs import evaluate_pairs

            if overrides or split:
                raise UserError("--pairs: replaces the data set; remove --split and overrides")
            return evaluate_pairs(checkpoint, pairs, folder, device=device, batch_size=batch_size, trust=trust)
        config, task, data, results = evaluate_checkpoint(
            checkpoint, overrides or [], stack, split=split, device=device, batch_size=batch_size, trust=trust
        )
        failed = _print_scores(config, task, results)
        if folder is not None:
            try:
                save_results(folder, task, results, data, checkpoint=locate(checkpoint))
                print(f"report      {folder / 'report.html'}")
            except OSError as fault:
                raise UserError(
                    f"--out {out}: cannot be written ({fault.strerror}); choose another folder", 1
                ) from fault
        print(fold(printable_lines("\n".join(task.verdict().lines())), pipe_width=PIPE_WIDTH))
        return 1 if failed else 0


def _print_scores(config: "Config", task: "Task", results: dict[str, float]) -> bool:
    """Prints scores, the number of samples, and those that cannot be read; returns whether these are too many."""
    from vlm.io.terminal import fold
    from vlm.training.callbacks.bad_samples import LIMIT
    from vlm.training.run.train import column_note, format_score_table, split_note

    note = split_note(config, results)
    if task.trained.is_on_training_data:
        note = "\n(the model was trained on these samples: its scores on new ones are lower)"
    print(format_score_table(results) + fold("\n".join([note, column_note(results), *task.notes()])))
    callback = config.get("callbacks", {}).get("bad_samples", {})
    limit = 1.0 if callback is None else callback.get("limit", LIMIT)  # as in the run's training
    unreadable = task.evaluation.unreadable
    count = task.evaluation.used + len(unreadable)
    failed = len(unreadable) > limit * count
    bound = f"more than the {limit:.0%}" if failed else f"up to {limit:.0%} may be"
    share = f"{len(unreadable) / max(1, count):.1%}"
    skipped = f", {len(unreadable):,} unreadable and skipped ({share}; {bound})" if unreadable else ""
    print(f"\nsamples     {task.evaluation.used:,} used{skipped}")
    for reason in unreadable:
        print_error(printable(reason), "error" if failed else "skipped")
    return failed


def import_folder(
    folder: Annotated[str, Option("A Hugging Face folder, hf:ORG/NAME, a GGUF file, or adapters.", positional=True)],
    out: Annotated[str, Option("Output checkpoint.", metavar="FILE")],
    mmproj: Projector = None,
    adapters: Adapters = None,
) -> int:
    """Converts a Hugging Face folder, a GGUF file or adapters with their base to one checkpoint; returns the status."""
    from vlm.checkpoint.file import write
    from vlm.checkpoint.hugging_face import from_folder
    from vlm.checkpoint.load import load_model, locate, read, strip_training_state
    from vlm.inference.info import describe
    from vlm.io.output import refuse_unwritable
    from vlm.models.pretrained.load import is_published, open_folder

    place = locate(join_places(folder, mmproj=mmproj, adapters=adapters))
    published = is_published(place)
    if not published and not place.is_file():
        raise UserError(f"{folder}: is not a Hugging Face folder, because it has no config.json")
    refuse_unwritable(os.path.realpath(out), f"--out {out}")
    checkpoint = from_folder(open_folder(place)) if published else strip_training_state(place, read(place))
    load_model(checkpoint)  # before anything is written
    write(out, checkpoint)
    print(describe(out))
    return 0


def average(
    checkpoints: Annotated[list[str], Option("Checkpoints or runs of one model.", positional=True)],
    out: Annotated[str, Option("Output checkpoint.", metavar="FILE")],
) -> int:
    """Writes a checkpoint with the mean weights of several, and returns the exit status."""
    from vlm.checkpoint.file import write
    from vlm.checkpoint.load import average_checkpoints, load_model
    from vlm.inference.info import describe
    from vlm.io.output import refuse_unwritable

    if len(checkpoints) < 2:
        raise UserError(f"{checkpoints[0]}: is one checkpoint, and an average needs two or more; name others too")
    refuse_unwritable(os.path.realpath(out), f"--out {out}")
    checkpoint = average_checkpoints(checkpoints)
    load_model(checkpoint)  # before anything is written
    write(out, checkpoint)
    print(describe(out))
    return 0


def export(
    folder: Annotated[str, Option("Output folder. Created if missing; must be empty.", metavar="DIR", positional=True)],
    checkpoint: Checkpoint,
    to: Annotated[
        str,
        Option(
            "huggingface: for transformers; safetensors: for vlm; gguf: for llama.cpp; peft: adapters without their "
            "base; onnx or pt2: runs without vlm or transformers.",
            choices=("huggingface", "safetensors", "gguf", "peft", "onnx", "pt2"),
        ),
    ] = "huggingface",
    outtype: Annotated[
        str | None,
        Option("Type of the matrices of --to gguf: f32, f16 or q8_0. [default: f16]", choices=("f32", "f16", "q8_0")),
    ] = None,
    trust: Trust = None,
    mmproj: Projector = None,
    adapters: Adapters = None,
) -> int:
    """Writes a checkpoint as a folder in another format, prints the files and returns the exit status."""
    from vlm.checkpoint.export import export as write

    if outtype is not None and to != "gguf":
        raise UserError(f"--outtype {outtype}: is an option of --to gguf; remove it, or add --to gguf")
    checkpoint = join_places(checkpoint, mmproj=mmproj, adapters=adapters)
    for name in write(checkpoint, folder, form=to, trust=trust, outtype=outtype or "f16"):
        print(os.path.join(folder, name))
    return 0


def info(checkpoint: Checkpoint, mmproj: Projector = None, adapters: Adapters = None) -> int:
    """Prints the contents of a checkpoint."""
    from vlm.inference.info import describe

    print(describe(join_places(checkpoint, mmproj=mmproj, adapters=adapters)))
    return 0
