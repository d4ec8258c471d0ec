"""`vlm info`, `vlm import` and `vlm export`. torch is imported only inside a command."""

import os
from typing import Annotated

from vlm.errors import UserError
from vlm.inference.options import Checkpoint, Option, Trust


def import_folder(
    folder: Annotated[str, Option("A Hugging Face folder, hf:ORG/NAME, a GGUF file, or adapters.", positional=True)],
    out: Annotated[str, Option("The checkpoint to write.", metavar="FILE")],
) -> int:
    """Make one checkpoint file of a Hugging Face folder or GGUF file, or of adapters and their base."""
    from vlm.checkpoint.adapters import as_one
    from vlm.checkpoint.hugging_face import from_folder
    from vlm.checkpoint.load import load_model, locate, read
    from vlm.checkpoint.save import write
    from vlm.inference.info import describe
    from vlm.io.output import refuse_unwritable
    from vlm.models.pretrained.opened import is_published, opened

    place = locate(folder)
    published = is_published(place)
    if not published and not place.is_file():
        raise UserError(f"{folder}: is not a Hugging Face folder: it has no config.json; give one that has")
    refuse_unwritable(os.path.realpath(out), f"--out {out}")
    checkpoint = from_folder(opened(place)) if published else as_one(place, read(place))
    load_model(checkpoint)  # before anything is written
    write(out, checkpoint)
    print(describe(out))
    return 0


def export(
    folder: Annotated[str, Option("The folder to write; it is made, or is empty.", metavar="DIR", positional=True)],
    checkpoint: Checkpoint,
    to: Annotated[
        str, Option("huggingface, for transformers; safetensors, for vlm; onnx or pt2: graphs that need neither.")
    ] = "huggingface",
    trust: Trust = None,
) -> int:
    """Write a checkpoint as a folder for others: weights or graphs, tokenizer, preprocessing, model card."""
    from vlm.checkpoint.export import export as write

    for name in write(checkpoint, folder, form=to, trust=trust):
        print(os.path.join(folder, name))
    return 0


def info(checkpoint: Checkpoint) -> int:
    """Prints what a checkpoint holds."""
    from vlm.inference.info import describe

    print(describe(checkpoint))
    return 0
