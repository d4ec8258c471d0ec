"""Starting from a local folder of Hugging Face: `config.json` and safetensors of one of `architectures`.

The folder must describe the model that was built; every shape is checked before anything is copied, and what is left
over on either side is named. Nothing is fetched and no pickle is read.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.pretrained.architecture import Architecture, architecture_of, parts_of
from vlm.models.pretrained.files import read_config, read_tensors
from vlm.models.pretrained.report import grouped
from vlm.models.pretrained.sizes import grid_side, sizes_built
from vlm.models.pretrained.stack import Part, Source, Sources, prefixed
from vlm.models.vit import ViT
from vlm.nn.position import regridded

SIZES = ("dim", "num_heads", "mlp_ratio")  # that a config says once, under model.size
# Never compared: what tensors show, and a size of images, to whose grid positions are interpolated.
NEVER = ("prefix", "vocabulary_head", "context_dim", "image_size")
GRID = "positions.weight"  # of a ViT
SHOWN = 20  # faults, at most
TABLES = ("wpe.weight", "position_embeddings.weight")  # of texts: a shorter one needs the first rows alone
# The remedy for a value that other parts of the config depend on.
REMEDIES = {
    "vocab_size": "choose the tokenizer it was trained with, of {} tokens",
    "max_len": "set data.max_len={} or less",
    "stem": "choose model/encoder=vit",
}


@dataclass(frozen=True)
class _Placed:
    """A stack of the model, and what of the folder describes it.

    Args:
        ours: Prefix of its names in the model: "", "encoder." or "decoder.".
    """

    stack: Any
    ours: str
    part: Part

    def differences(self) -> Iterator[tuple[str, Any, Any]]:
        """Yields (argument, as built, as stored) wherever they differ."""
        built, kind = sizes_built(self.stack), self.part.stack
        for name, value in ({"embed_norm": False} | kind.arguments(self.part.config)).items():
            # The first positions of more are all that a shorter text needs.
            fits = built[name] <= value if name == "max_len" else name in NEVER or built.get(name, value) == value
            if not fits:
                yield name, built[name], value

    def notes(self) -> Iterator[str]:
        """A line where positions of patches are interpolated."""
        theirs = self.part.stack.arguments(self.part.config).get("image_size")
        if (own := sizes_built(self.stack).get("image_size")) != theirs:
            yield f"{self.ours}{GRID}: images are of {own} pixels, in the folder of {theirs}; interpolated"

    def sources(self, names: Iterable[str]) -> Sources:
        kind, _, prefix = self.part
        own = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        stem = kind.stem if any(name.startswith(kind.stem) for name in own) else ""
        inner = {name.removeprefix(stem) for name in own if name.startswith(stem)}
        sources = kind.sources(self.stack, inner)
        if isinstance(self.stack, ViT):
            sources[GRID] = _regridding(self.stack, *sources[GRID])
        tensors = prefixed(sources, self.ours, prefix + stem)
        return tensors | prefixed(kind.head(self.stack, own), self.ours, prefix)


def _regridding(vit: ViT, names: tuple[str, ...], make: Callable[..., Tensor]) -> Source:
    """The source of positions on a grid, interpolated to that of a ViT's images."""
    return names, lambda *tables: regridded(make(*tables), grid_side(vit), before=vit.leading)


def load_hugging_face(model: nn.Module, folder: str) -> list[str]:
    """Copies the weights of a local Hugging Face folder into a model that was built to its sizes.

    Args:
        model: A stack that the folder has, or a model with it; what the folder has nothing for stays as it is.
        folder: Holds config.json and model.safetensors (or its shards).
    Returns:
        Lines that say what was taken, and all that was left over on either side.
    Raises:
        UserError: The folder cannot be read, or is not of the model that was built; with a line for each fault.
    """
    tensors, lines = hugging_face_state(model, folder)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
    return lines


def hugging_face_state(
    model: nn.Module, folder: str, stored: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights that `load_hugging_face` copies, by our names, and its lines; the model may hold none, on "meta".

    Args:
        stored: The folder's tensors, where they have been read before.
    Raises:
        UserError: As `load_hugging_face`.
    """
    config = read_config(folder)
    architecture = architecture_of(config, folder)
    placed = _placed(model, architecture, config, folder)
    _refuse(_config_faults(placed, folder))
    stored = read_tensors(folder) if stored is None else stored
    sources: Sources = {}
    for one in placed:
        sources |= one.sources(stored)
    sources = architecture.adjust(sources, stored)
    state = model.state_dict()
    sources |= _head_sources(model, architecture, stored, state)
    tensors, faults = _make(sources, stored, state, folder)
    _refuse(faults)
    notes = [note for one in placed for note in one.notes()]
    return tensors, _report(sources, stored, state, folder) + notes


def _refuse(faults: list[str]) -> None:
    lines = [f"model.init_from: {fault}" for fault in faults[:SHOWN]]
    if len(faults) > SHOWN:
        lines.append(f"model.init_from: {len(faults) - SHOWN} more")
    if lines:
        raise UserError("\n".join(lines))


def _placed(model: nn.Module, architecture: Architecture, config: Mapping[str, Any], folder: str) -> list[_Placed]:
    """The stacks of the model that the folder describes.

    Raises:
        UserError: The model has no such stack.
    """
    parts = parts_of(architecture, config, folder)
    if len(parts) > 1 and not all(hasattr(model, place) for place in parts):
        raise UserError(
            f"model.init_from: {folder} holds an encoder with a decoder, the model is a {type(model).__name__}; "
            "use it for a model that has both"
        )
    return [_place(model, place, part, folder) for place, part in parts.items()]


def _place(model: nn.Module, place: str, part: Part, folder: str) -> _Placed:
    kind = part.stack.kind
    stack, ours = (model, "") if isinstance(model, kind) else (getattr(model, place, None), f"{place}.")
    if not isinstance(stack, kind):
        has = f"its {place} is a {type(stack).__name__}" if stack is not None else f"that has no {place}"
        raise UserError(
            f"model.init_from: {folder} holds a {part.config.get('model_type')} for a {kind.__name__}, the model is a "
            f"{type(model).__name__}, {has}; choose another folder"
        )
    return _Placed(stack, ours, part)


def _config_faults(placed: list[_Placed], folder: str) -> list[str]:
    faults = [
        f"{folder} has {fault}, which our {type(one.stack).__name__} does not do; choose another folder"
        for one in placed
        for fault in one.part.stack.not_ours(one.part.config)
    ]
    try:
        differences = [(one, *difference) for one in placed for difference in one.differences()]
        first = placed[0].part.stack.arguments(placed[0].part.config)
    except (TypeError, ValueError, ZeroDivisionError) as fault:
        raise UserError(
            f"model.init_from: config.json in {folder} has a value that is no size ({fault}); restore the file"
        ) from fault
    for one, name, built, value in differences:
        remedy = _remedy(one, name, value, encoder=first.get(name), alone=len(placed) == 1)
        faults.append(f"{one.ours}{name} is {_as_text(built)}, {folder} has {_as_text(value)}; {remedy}")
    return faults


def _remedy(placed: _Placed, name: str, value: Any, *, encoder: Any, alone: bool) -> str:
    """The change to the config that mends a fault.

    Args:
        encoder: The encoder's value where the folder has an encoder: sizes are the decoder's where the two differ.
        alone: Whether the folder has one stack.
    """
    if name in REMEDIES:
        return REMEDIES[name].format(_as_text(value))
    if name == "positions":
        decodes = isinstance(placed.stack, Decoder)
        return "choose model/position=learned" if decodes else f"take model.{placed.ours}positions away"
    if name == "depth":
        return f"set model.size.{placed.ours.replace('.', '_')}depth={_as_text(value)}"
    if name not in SIZES:
        return f"set model.{placed.ours}{name}={_as_text(value)}"
    if placed.ours == "encoder." and not alone:
        return f"set model.encoder.{name}={_as_text(value)}"
    apart = f" and model.encoder.{name}={_as_text(encoder)}" if encoder != value else ""
    return f"set model.size.{name}={_as_text(value)}{apart}"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _head_sources(
    model: nn.Module, architecture: Architecture, stored: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> Sources:
    """Sources of the tensors around the stacks, as far as both sides have them, of as many classes."""
    heads = architecture.heads.get(type(model))
    head = {} if heads is None else heads(model, stored)
    head = {name: source for name, source in head.items() if name in state and all(one in stored for one in source[0])}
    if "head.weight" in head and any(len(stored[name]) != len(state["head.weight"]) for name in head["head.weight"][0]):
        return {name: source for name, source in head.items() if not name.startswith("head.")}
    return head


def _make(
    sources: Sources, stored: Mapping[str, Tensor], state: Mapping[str, Tensor], folder: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Our tensors made of theirs, and all that is wrong with them."""
    tensors, faults = {}, []
    for name, (names, make) in sources.items():
        unfit = list(_unfit(name, names, stored, folder))
        if name not in state:
            unfit = [f"the model has no {name}, {folder} has {names[0]}; choose model=pretrained"]
        faults += unfit
        if unfit:
            continue
        try:
            tensors[name] = make(*(stored[other] for other in names))
        except UserError as fault:
            faults.append(f"{folder}: {fault}")
            continue
        except (RuntimeError, IndexError, ValueError):  # of shapes that cannot even be joined
            tensors[name] = torch.empty(0)
        if tensors[name].shape != state[name].shape:
            theirs = " with ".join(f"{other} {tuple(stored[other].shape)}" for other in names)
            faults.append(f"{name} is {tuple(state[name].shape)}, {folder} has {theirs}; choose another folder")
    return tensors, faults


def _unfit(name: str, names: Iterable[str], stored: Mapping[str, Tensor], folder: str) -> Iterator[str]:
    for other in names:
        if other not in stored:
            yield f"{folder} has no {other}, of which {name} is made; fetch it again"
        elif not stored[other].is_floating_point():
            yield f"{other} in {folder} is {stored[other].dtype}; give weights that are not quantised"


def _report(sources: Sources, stored: Mapping[str, Tensor], state: Mapping[str, Tensor], folder: str) -> list[str]:
    taken = {name for names, _ in sources.values() for name in names}
    left = grouped(stored.keys() - taken, taken)
    for name, (names, _) in sources.items():
        rows, kept = len(stored[names[0]]), len(state[name])
        if name.endswith("positions.weight") and names[0].endswith(TABLES) and kept < rows:
            left.append(f"rows {kept} to {rows - 1} of {names[0]}")
    fresh = grouped(state.keys() - sources.keys(), sources.keys())
    lines = [f"{folder}: {len(taken)} tensors taken"]
    lines += [f"{folder}: left over: {', '.join(left)}"] if left else []
    return lines + ([f"model: not in {folder}, stays as it was: {', '.join(fresh)}"] if fresh else [])
