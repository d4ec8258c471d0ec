"""The model that a folder describes, as checkpoints specify it, and the task that it is for."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vlm.models.pretrained.architecture import Spec, spec_of
from vlm.models.pretrained.fields import Fields
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.stack import Part, Stack
from vlm.nn.image_size import ImageSize, plain


class Specified(NamedTuple):
    """A folder's model.

    Args:
        task: The task that it is for; None for one without a head.
        model: Its specification; None for one without a head.
        parts: The specifications of its stacks by their place, "encoder" and "decoder".
    """

    task: str | None
    model: Spec | None
    parts: Mapping[str, Spec]


def specify(folder: Folder, *, image_size: ImageSize | None = None) -> Specified:
    """The model of a folder.

    Args:
        image_size: Size of the images that are made for it, where its positions may be interpolated.
    Raises:
        UserError: Our layers do not compute it.
    """
    parts = {place: _spec(part, image_size) for place, part in folder.parts.items()}
    if folder.origin not in folder.architecture.models:
        return Specified(None, None, parts)
    task, build = folder.architecture.models[folder.origin]
    return Specified(task, build(folder.config, parts), parts)


def _spec(part: Part, image_size: ImageSize | None) -> Spec:
    stack, config, _ = part
    if stack.regrids and image_size is not None:
        config |= {"image_size": plain(image_size)}
    sizes = arguments_of(stack, config)
    if "mlp_ratio" in sizes:
        sizes["mlp_ratio"] = _ratio(round(sizes["mlp_ratio"] * sizes["dim"]), sizes["dim"])
    return spec_of(stack.kind.__name__, **sizes)


def arguments_of(stack: Stack, config: Fields) -> dict[str, Any]:
    """The arguments that a stack of ours is built with."""
    sizes = stack.arguments(config)
    sizes.pop("stem", None)  # of plain patches by default, as positions are learned
    plain = {"positions": "learned", "final_norm": True}
    return {name: value for name, value in sizes.items() if name not in plain or plain[name] != value}


def _ratio(hidden: int, dim: int) -> float:
    """The ratio that a block makes the hidden width of, rounding down."""
    return hidden / dim if int(dim * (hidden / dim)) == hidden else (hidden + 0.5) / dim
