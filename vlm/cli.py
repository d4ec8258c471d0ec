"""The `vlm` command. torch is imported only inside a command."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from vlm.errors import UserError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train, evaluate and use small vision-language models.",
)

Checkpoint = Annotated[str, typer.Option("-c", "--checkpoint", help="The model: a .ckpt file.", metavar="CKPT")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images at a time.")]
Format = Annotated[str, typer.Option("--format", help="text, jsonl or csv.")]
Out = Annotated[str | None, typer.Option(help="Write to this file instead of stdout.", metavar="FILE")]
Trust = Annotated[str | None, typer.Option(help="Package of your own whose model classes may be loaded.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[OVERRIDES]...", help="Config values, as KEY=VALUE.")]


def main() -> None:
    """Runs a command; what a user can cause leaves as a line and an exit status, never as a traceback."""
    if sys.argv[1:2] == ["train"]:
        from vlm.training import main as train

        sys.exit(train(sys.argv[2:]))
    sys.exit(_report(lambda: app(standalone_mode=False)))


def _report(command: Callable[[], int | None]) -> int:
    # typer has a copy of click of its own in newer versions; its exceptions are reached through typer.
    usage_error: type[Exception] = typer.BadParameter.__bases__[0]
    try:
        return command() or 0
    except UserError as fault:
        if os.environ.get("VLM_DEBUG") == "1":
            raise
        print(f"error: {fault}", file=sys.stderr)
        return fault.status
    except usage_error as fault:
        print(f"error: {fault.format_message()} (see vlm --help)", file=sys.stderr)  # type: ignore[attr-defined]
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


@app.command("train", help="Train a model: vlm train [OVERRIDES], the same as python train.py.")
def _train(overrides: Overrides = None) -> int:
    """Only for `vlm --help`; `main` takes the command before options are parsed, since overrides are Hydra's."""
    from vlm.training import main as train

    return train(overrides or [])


@app.command()
def caption(
    images: Annotated[list[str], typer.Argument(help="Image files, folders or patterns.")],
    checkpoint: Checkpoint,
    device: Device = "auto",
    batch_size: BatchSize = 32,
    form: Format = "text",
    out: Out = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest caption, in tokens.")] = None,
    trust: Trust = None,
) -> int:
    """Caption images: one line an image, PATH<TAB>CAPTION."""
    from vlm.inference.files import Writer, find_images

    paths = find_images(images)
    writer = Writer(form=form, fields=("image", "caption"), out=out)
    from vlm.inference.captioning import Captioner, caption_files

    captioner = Captioner(checkpoint, device=choose_device(device), trust=trust)
    try:
        return caption_files(captioner, paths, writer, batch_size=batch_size, max_tokens=max_tokens)
    finally:
        writer.close()


@app.command()
def evaluate(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    split: Annotated[str | None, typer.Option(help="train, val or test; by default test, else val.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for metrics.json and the predictions.", metavar="DIR")] = None,
    device: Device = "auto",
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images at a time.")] = None,
    trust: Trust = None,
) -> int:
    """Evaluate a checkpoint on a split of its data, with the controls any model should beat."""
    from vlm.evaluation import evaluate_checkpoint

    return evaluate_checkpoint(
        checkpoint, overrides or [], split=split, out=out, device=device, batch_size=batch_size, trust=trust
    )


@app.command()
def info(checkpoint: Checkpoint) -> int:
    """Say what a checkpoint holds: task, model, tokenizer, data, step and scores."""
    from vlm.inference.info import describe

    print(describe(checkpoint))
    return 0


def choose_device(name: str) -> str:
    """The device of --device.

    Raises:
        UserError: It is unknown, or this machine has none.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device: {name!r} is unknown; choose auto, cpu or cuda")
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device that torch can use; choose cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def run(argv: Sequence[str]) -> int:
    """Runs a command in this process, for tests; returns its exit status."""
    return _report(lambda: app(list(argv), standalone_mode=False))
