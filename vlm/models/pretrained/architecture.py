"""A kind of folder: its parts, the models of ours that it gives, their heads. Each is a module of `architectures`."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vlm.errors import UserError
from vlm.models.pretrained.files import KEY
from vlm.models.pretrained.generation import read_generation
from vlm.models.pretrained.specs import Spec
from vlm.models.pretrained.stack import Names, Part, Sources

FOLDER = Path(__file__).parent / "architectures"


class Model(NamedTuple):
    """A complete model of theirs as one of ours.

    Args:
        task: The task that it is for.
        build: Its specification, of config.json and those of its parts.
    """

    task: str
    build: Callable[[Mapping[str, Any], Mapping[str, Spec]], Spec]


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model_type of Hugging Face.

    Args:
        parts: Of config.json, the stacks by their place in ours, "encoder" and "decoder".
        models: Complete models, by the names of their classes.
        heads: Sources of the tensors around the stacks of a model of ours, by its class; of the model and their names.
        adjust: Change to all sources, of their names too.
        generation: The folder's options of writing, of the folder and its config.json.
        added: Pieces that its own code adds at the end of a vocabulary which lacks them.
    """

    parts: Callable[[Mapping[str, Any]], Mapping[str, Part]]
    models: Mapping[str, Model] = field(default_factory=dict)
    heads: Mapping[type, Callable[[Any, Names], Sources]] = field(default_factory=dict)
    adjust: Callable[[Sources, Names], Sources] = lambda sources, names: sources
    generation: Callable[[str, Mapping[str, Any]], dict[str, Any]] = read_generation
    added: tuple[str, ...] = ()


def architecture_of(config: Mapping[str, Any], folder: str) -> Architecture:
    """The architecture of a config.json.

    Raises:
        UserError: There is no module for it.
    """
    model_type = config.get("model_type")
    name = str(model_type).replace("-", "_")
    known = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
    if name not in known:
        raise UserError(
            f"{KEY}: {folder} holds a model of type {model_type!r:.40}; what can be read is {', '.join(known)}"
        )
    return importlib.import_module(f"vlm.models.pretrained.architectures.{name}").ARCHITECTURE


def parts_of(architecture: Architecture, config: Mapping[str, Any], folder: str) -> Mapping[str, Part]:
    """The parts of a folder, by their place.

    Raises:
        UserError: Its config.json does not describe them.
    """
    try:
        return architecture.parts(config)
    except (KeyError, TypeError, ValueError) as fault:
        reason = f"config.json lacks {fault}" if isinstance(fault, KeyError) else fault
        raise UserError(f"{KEY}: {folder}: {reason}; choose another folder") from fault
