"""The config to evaluate a model without a run: a Hugging Face folder, or an imported one."""

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import Any

from vlm.config.compose import compose
from vlm.data.text.prompt_form import reads_images_inside_texts
from vlm.errors import UserError
from vlm.nn.image_size import as_override, sides
from vlm.training.config.check import check

LONGEST = 1024  # most tokens of a scored text, even if the model reads more


def foreign_config(path: str, about: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the task's default config with the model's sizes and the overrides applied.

    Args:
        path: The checkpoint.
        about: Its content besides the weights.
        overrides: They choose the data, and the task if they name one.
    Raises:
        UserError: The model is for another task, or an override is at fault.
    """
    task = str(about["task"])
    if task == "embedding":
        raise UserError(f"{path}: holds an encoder alone, which no split scores; give a model with a head")
    if reads_images_inside_texts(about):
        raise UserError(
            f"{path}: reads its images inside prompts, which an evaluation does not write; caption the images with "
            "`vlm caption --format jsonl --out FILE`, and compare with `vlm score`"
        )
    if asked := [text for text in overrides if text.startswith("task=") and text != f"task={task}"]:
        raise UserError(f"{asked[0]}: {path} holds a model for {task}; leave the override out")
    own = [text for text in overrides if not text.startswith("task=")]
    no_choice = "callbacks.checkpoints=null"  # no split chose these weights
    return compose([f"task={task}", no_choice, *_sizes(about), *own], check)


def _sizes(about: Mapping[str, Any]) -> Iterator[str]:
    if "preprocess" in about:
        size = about["preprocess"]["image_size"]
        yield f"data.image_size={as_override(size)}"
        yield f"model.encoder.patch_size={gcd(*sides(size))}"  # for the task's default model, which is not used
    lengths = [*_found(about["model"], "max_len")]
    if lengths:
        yield f"data.max_len={min(about.get('max_len', LONGEST), LONGEST, *lengths)}"
    stored = about.get("decoding", {})
    if "max_tokens" in stored:
        yield f"task.max_tokens={stored['max_tokens']}"
        yield from (f"task.{name}={stored[name]}" for name in ("beam", "length_penalty") if name in stored)


def _found(spec: Any, name: str) -> Iterator[int]:
    """Yields the values of an argument in all parts of a specification."""
    for key, value in spec.items() if isinstance(spec, Mapping) else ():
        if key == name and type(value) is int:
            yield value
        yield from _found(value, name)
