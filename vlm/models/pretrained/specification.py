"""The model that a config.json describes, as checkpoints specify it, and the task that it is for."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vlm.errors import UserError
from vlm.models.pretrained.architecture import Architecture, architecture_of, parts_of
from vlm.models.pretrained.files import KEY
from vlm.models.pretrained.specs import Spec, part_of
from vlm.models.pretrained.stack import Part

NO_ARGUMENTS = ("stem", "positions")  # what a ViT, an encoder of text and a decoder of ours have by default


class Specified(NamedTuple):
    """A folder's model.

    Args:
        architecture: Its kind.
        task: The task that it is for; None for one without a head.
        model: Its specification; None for one without a head.
        parts: The specifications of its stacks by their place, "encoder" and "decoder".
    """

    architecture: Architecture
    task: str | None
    model: Spec | None
    parts: Mapping[str, Spec]


def specify(config: Mapping[str, Any], folder: str, *, image_size: int | None = None) -> Specified:
    """The model of a folder.

    Args:
        image_size: Size of the images that are made for it, where its positions may be interpolated.
    Raises:
        UserError: Our layers do not compute it.
    """
    architecture = architecture_of(config, folder)
    parts = {place: _spec(part, folder, image_size) for place, part in parts_of(architecture, config, folder).items()}
    name = origin(config)
    if name not in architecture.models:
        return Specified(architecture, None, None, parts)
    task, build = architecture.models[name]
    return Specified(architecture, task, build(config, parts), parts)


def origin(config: Mapping[str, Any]) -> str:
    """The name of the class that saved a folder; its type in one that does not say."""
    return str((config.get("architectures") or [config["model_type"]])[0])[:100]


def _spec(part: Part, folder: str, image_size: int | None) -> Spec:
    stack, config, _ = part
    if faults := list(stack.not_ours(config)):
        raise UserError(f"{KEY}: {folder} has {', '.join(faults)}, which our {stack.kind.__name__} does not do")
    sizes = {name: value for name, value in stack.arguments(config).items() if name not in NO_ARGUMENTS}
    sizes["mlp_ratio"] = _ratio(round(sizes["mlp_ratio"] * sizes["dim"]), sizes["dim"])
    if stack.regrids and image_size is not None:
        sizes["image_size"] = image_size
    return part_of(stack.kind.__name__, **sizes)


def _ratio(hidden: int, dim: int) -> float:
    """The ratio that a block makes the hidden width of, rounding down."""
    return hidden / dim if int(dim * (hidden / dim)) == hidden else (hidden + 0.5) / dim
