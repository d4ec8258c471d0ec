"""Describes a checkpoint."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.load import ADAPTERS
from vlm.checkpoint.rebuild import convert_errors
from vlm.checkpoint.stored import Checkpoint, restore_interpolations
from vlm.config.tree import resolve as resolved
from vlm.errors import printable
from vlm.inference.tasks import TASKS, current_task_name, import_object

# Model arguments that are sizes, in display order.
SIZES = (
    "image_size",
    "patch_size",
    "vocab_size",
    "max_len",
    "dim",
    "depth",
    "encoder_depth",
    "decoder_depth",
    "num_heads",
    "embed_dim",
    "attention_dim",
    "num_classes",
)


def describe(path: str) -> str:
    """Returns a few lines about a checkpoint: task, model with sizes, tokenizer, classes, data, step, scores.

    Raises:
        UserError: There is no such checkpoint, or it cannot be read.
    """
    loaded = ckpt.read(path)
    with convert_errors(path):
        return "\n".join(_lines(loaded))


def _lines(loaded: Checkpoint) -> list[str]:
    metadata = loaded["vlm"]
    specified = cast(dict[str, Any], metadata["model"])
    task = TASKS.get(current_task_name(metadata["task"]))
    predictor = None if task is None else import_object(task.predictor)
    count = sum(tensor.numel() for tensor in ckpt.inference_weights(loaded).values())
    scores = {name: value for name, value in metadata["scores"].items() if "@" not in name}
    if (entry := loaded.get(ADAPTERS)) is None:
        adapters = []
    else:
        bases = (f"{base['place']} ({base['hash'][:12]})" for base in entry["base"].values())
        adapters = [f"adapters    of {entry['layers']} layers, changing {', '.join(bases)}"]
    lines = [
        f"task        {metadata['task']}",
        f"model       {_format_class(specified)}, {count:,} parameters",
        *_part_lines(specified, "  "),
        *(() if predictor is None else predictor.describe(metadata)),
        *_training_lines(loaded),
        *adapters,
        f"scores      {', '.join(f'{name} {value:.4g}' for name, value in scores.items()) or 'none yet'}",
    ]
    return [printable(line) for line in lines]


def _training_lines(loaded: Checkpoint) -> list[str]:
    about = loaded["vlm"]
    if "origin" in about:
        return [f"from        a {about['origin']} of Hugging Face"]
    data = resolved(restore_interpolations(about["config"]))["data"]
    place = data.get("root") or data.get("path") or ""
    steps = f"{loaded['global_step']:,} steps, {loaded['epoch'] + 1} epochs begun"
    return [f"data        {data['source']['_class_']} {place}".rstrip(), f"trained     {steps}"]


def _part_lines(spec: dict[str, Any], indent: str) -> Iterator[str]:
    """Yields a line for each part of a model, with its sizes; the other arguments are in the run's config.yaml."""
    for name, value in spec["args"].items():
        if isinstance(value, dict) and "name" in value:
            yield f"{indent}{name}: {_format_class(value)}"
            yield from _part_lines(value, f"{indent}  ")


def _format_class(spec: dict[str, Any]) -> str:
    """Returns the class of a model or a part, and its sizes, such as "ViT (image_size=32 dim=16 depth=1)"."""
    sizes = {name: spec["args"][name] for name in SIZES if spec["args"].get(name) is not None}
    return spec["name"].rpartition(".")[2] + (f" ({format_values(sizes)})" if sizes else "")


def format_values(values: Mapping[str, Any]) -> str:
    """Returns values with their names, such as "dim=16 depth=1"."""
    return " ".join(f"{name}={value}" for name, value in values.items())
