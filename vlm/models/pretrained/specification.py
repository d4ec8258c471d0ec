"""The specification of the model that a folder describes, and its task."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from vlm.models.pretrained.architecture import Spec, make_spec
from vlm.models.pretrained.fields import Fields, refuse_unread_keys
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.quantised import read_quantisation
from vlm.models.pretrained.stack import Part, Stack
from vlm.nn.image_size import ImageSize, plain


class FolderSpecification(NamedTuple):
    """A folder's model.

    Args:
        task: Its task; None for a model without a head.
        model: Its specification; None for a model without a head.
        parts: The specifications of its stacks by place, such as "encoder" and "decoder".
    """

    task: str | None
    model: Spec | None
    parts: Mapping[str, Spec]


def specify(folder: Folder, *, image_size: ImageSize | None = None) -> FolderSpecification:
    """Specifies the model of a folder.

    Args:
        image_size: Size of the images to use, for models whose positions may be interpolated.
    Raises:
        UserError: Our layers do not support it.
    """
    read_quantisation(folder.config)
    parts = {place: _specify_part(part, image_size) for place, part in folder.parts.items()}
    if folder.origin not in folder.architecture.models:
        specified = FolderSpecification(None, None, parts)
    else:
        task, build = folder.architecture.models[folder.origin]
        specified = FolderSpecification(task, build(folder.config, parts), parts)
    refuse_unread_keys(folder.config, collect_neutral_keys(folder))
    return specified


def collect_neutral_keys(folder: Folder) -> dict[str, set[str]]:
    """Returns the keys that change nothing, by the path of an object in config.json."""
    neutral = {"": {*folder.architecture.neutral_keys}}
    for stack, config, _ in folder.parts.values():
        neutral.setdefault(config.within, set()).update(stack.neutral_keys)
    return neutral


def _specify_part(part: Part, image_size: ImageSize | None) -> Spec:
    stack, config, _ = part
    if stack.regrids and image_size is not None:
        config |= {"image_size": plain(image_size)}
    sizes = read_build_arguments(stack, config)
    if "mlp_ratio" in sizes:
        sizes["mlp_ratio"] = _exact_mlp_ratio(round(sizes["mlp_ratio"] * sizes["dim"]), sizes["dim"])
    return make_spec(stack.kind.__name__, **sizes)


def read_build_arguments(stack: Stack, config: Fields) -> dict[str, Any]:
    """Reads the arguments from which our stack is built."""
    sizes = stack.read_arguments(config)
    sizes.pop("stem", None)  # plain patches are the default, as are learned positions
    defaults = {"positions": "learned", "final_norm": True}
    return {name: value for name, value in sizes.items() if name not in defaults or defaults[name] != value}


def _exact_mlp_ratio(hidden: int, dim: int) -> float:
    """Returns the ratio that gives a block this hidden width, given that blocks round down."""
    return hidden / dim if int(dim * (hidden / dim)) == hidden else (hidden + 0.5) / dim
