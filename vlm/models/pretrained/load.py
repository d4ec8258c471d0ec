"""Weights of a Hugging Face folder in a model of ours that was built to its sizes.

Every shape is checked before anything is copied, and what is left over on either side is named.
"""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.report import grouped
from vlm.models.pretrained.sizes import sizes_built
from vlm.models.pretrained.stack import LAYER, Part, Weight, WeightMap, prefixed, weight_map
from vlm.models.projector import ProjectedEncoder
from vlm.models.vit import ViT
from vlm.nn.position import LearnedPositions, regridded

SIZES = ("dim", "num_heads", "mlp_ratio")  # that a config says once, under model.size
# Never compared: what tensors show, and a size of images, to whose grid positions are interpolated.
NEVER = ("prefix", "vocabulary_head", "context_dim", "image_size")
POSITIONS = "positions.weight"
SHOWN = 20  # faults, at most
LARGE = 2**26  # bytes of a tensor that is copied before others
# The remedy for a value that other parts of the config depend on.
REMEDIES = {
    "vocab_size": "choose the tokenizer it was trained with, of {} tokens",
    "max_len": "set data.max_len={} or less",
    "stem": "choose model/encoder=vit",
}


def load_hugging_face(model: nn.Module, folder: Folder) -> list[str]:
    """Copies the weights of a folder into a model that was built to its sizes.

    Args:
        model: A stack that the folder has, or a model with it; what the folder has nothing for stays as it is.
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
    model: nn.Module, folder: Folder, stored: dict[str, Tensor] | None = None, *, dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """The weights that `load_hugging_face` copies, by our names, and its lines; the model may hold none, on "meta".

    Args:
        stored: The folder's weights, where they have been read before.
        dtype: Type that weights are copied to, each of which then leaves `stored`, so that what lies in files is never
            there twice. By default they are as they are stored, and may lie in the files.
    Raises:
        UserError: As `load_hugging_face`.
    """
    placed = _placed(model, folder)
    _refuse([fault for one in placed for fault in one.faults(folder, placed)])
    stored = folder.weights() if stored is None else stored
    for pattern, new in folder.architecture.renamed:
        for name in [*stored]:  # in place, since tensors leave `stored`
            stored[re.sub(pattern, new, name)] = stored.pop(name)
    state, weights, faults = model.state_dict(), WeightMap(), list[str]()
    for one in placed:
        weights |= one.weights(stored)
        faults += one.foreign(stored, folder)
    weights = folder.architecture.adjust(weights, stored)
    weights |= _head(model, folder, stored, state)
    lines = _report(weights, stored, state, folder)
    lines += [note for one in placed for note in one.notes(weights, stored, folder)]
    tensors, more = _make(weights, stored, state, folder, dtype)
    _refuse(faults + more)
    return tensors, lines


def _refuse(faults: list[str]) -> None:
    lines = faults[:SHOWN] + ([f"{len(faults) - SHOWN} more"] if len(faults) > SHOWN else [])
    if lines:
        raise UserError("\n".join(lines))


@dataclass(frozen=True)
class _Placed:
    """A stack of the model, and the part of the folder that describes it.

    Args:
        ours: Prefix of its names in the model: "", "encoder." or "decoder.".
    """

    module: Any
    ours: str
    part: Part

    def faults(self, folder: Folder, placed: list["_Placed"]) -> Iterator[str]:
        """Yields a line with its remedy wherever the model was built to other sizes."""
        first = placed[0].part.stack.arguments(placed[0].part.config)
        built = sizes_built(self.module)
        for name, value in self.part.stack.arguments(self.part.config).items():
            # The first positions of more are all that a shorter text needs.
            fits = built[name] <= value if name == "max_len" else name in NEVER or built.get(name, value) == value
            if not fits:
                remedy = _remedy(self, name, value, encoder=first.get(name), alone=len(placed) == 1)
                yield f"{self.ours}{name} is {_as_text(built[name])}, {folder} has {_as_text(value)}; {remedy}"

    def notes(self, weights: WeightMap, stored: Mapping[str, Tensor], folder: Folder) -> Iterator[str]:
        """Yields a line where positions are not those of the folder as they are."""
        name, sizes = f"{self.ours}{POSITIONS}", sizes_built(self.module)
        if isinstance(self.module, ViT):
            theirs = self.part.stack.arguments(self.part.config)["image_size"]
            if (own := sizes.get("image_size")) != theirs:
                yield f"{name}: images are of {own} pixels, in the folder of {theirs}; interpolated"
            return
        other = weights[name].names[0] if name in weights else ""
        if sizes.get("positions") == "learned" and other in stored and (rows := len(stored[other])) > sizes["max_len"]:
            yield f"{folder}: left over: rows {sizes['max_len']} to {rows - 1} of {other}"

    def weights(self, stored: Iterable[str]) -> WeightMap:
        stack, config, prefix = self.part
        own, theirs = self._inside(stored)
        weights = stack.weights(self.module, {name.removeprefix(theirs) for name in own if name.startswith(theirs)})
        if POSITIONS in weights:
            weights[POSITIONS] = _fitted(self.module, weights[POSITIONS], stack.arguments(config).get("image_size"))
        head = _complete(weight_map(stack.head, self.module.state_dict(), own), own)
        if "vocabulary_head.own.weight" in head:  # then it is not that of the embedding
            head.pop("token_embed.weight", None)
        return prefixed(weights, self.ours, prefix + theirs) | prefixed(head, self.ours, prefix)

    def foreign(self, stored: Iterable[str], folder: Folder) -> Iterator[str]:
        """Yields a line for each module of theirs that ours lacks."""
        own, theirs = self._inside(stored)
        state = {LAYER.sub(".*.", name, count=1) for name in self.module.state_dict()}
        modules = {name.rpartition(".")[0] for name in state}
        for name, other in self.part.stack.names.items():
            paths = other.names if isinstance(other, Weight) else (other,) if isinstance(other, str) else other
            first = f"{theirs}{paths[0]}".replace("*", "0").replace(".{kind}", "")
            if name not in state | modules and (held := [one for one in own if one.startswith(first)]):
                yield f"the model has no {self.ours}{name}, {folder} has {min(held)}; choose model=pretrained"

    def _inside(self, stored: Iterable[str]) -> tuple[set[str], str]:
        """Their names after the part's prefix, and the prefix of a model that has a head."""
        stack, _, prefix = self.part
        own = {name.removeprefix(prefix) for name in stored if name.startswith(prefix)}
        return own, stack.prefix if any(name.startswith(stack.prefix) for name in own) else ""


def _fitted(module: nn.Module, weight: Weight, image_size: Any) -> Weight:
    """Positions, interpolated to the grid of a ViT's images; learned ones of a text, as many as ours may have.

    Args:
        image_size: Of the images that a ViT's are for.
    """

    def read(*tables: Tensor) -> Tensor:
        rows = weight.read(*tables)
        if isinstance(module, ViT):
            return regridded(rows, module.grid, before=module.leading, image_size=image_size)
        return rows[: module.max_len] if isinstance(module.positions, LearnedPositions) else rows

    return weight._replace(read=read)


def _placed(model: nn.Module, folder: Folder) -> list[_Placed]:
    """The stacks of the model that the folder describes.

    Raises:
        UserError: The model has no such stack.
    """
    # An encoder of images is taken of a folder that has one of texts beside it.
    parts = {place: part for place, part in folder.parts.items() if place != "text_encoder" or hasattr(model, place)}
    if len(parts) > 1 and not all(hasattr(model, place) for place in parts):
        raise UserError(
            f"{folder} holds an encoder with a decoder, the model is a {type(model).__name__}; use it for a model that "
            "has both"
        )
    return [_place(model, place, part, folder) for place, part in parts.items()]


def _place(model: nn.Module, place: str, part: Part, folder: Folder) -> _Placed:
    kind = part.stack.kind
    module, ours = (model, "") if isinstance(model, kind) else (getattr(model, place, None), f"{place}.")
    if isinstance(module, ProjectedEncoder):
        module, ours = module.backbone, f"{ours}backbone."
    if not isinstance(module, kind):
        has = f"its {place} is a {type(module).__name__}" if module is not None else f"that has no {place}"
        raise UserError(
            f"{folder} holds a {part.stack.model_type} for a {kind.__name__}, the model is a {type(model).__name__}, "
            f"{has}; choose another folder"
        )
    return _Placed(module, ours, part)


def _remedy(placed: _Placed, name: str, value: Any, *, encoder: Any, alone: bool) -> str:
    """The change to the config that mends a fault.

    Args:
        encoder: The encoder's value where the folder has an encoder: sizes are the decoder's where the two differ.
        alone: Whether the folder has one stack.
    """
    if name in REMEDIES:
        return REMEDIES[name].format(_as_text(value))
    if name == "positions":
        decodes = isinstance(placed.module, Decoder)
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
    if isinstance(value, Mapping):  # the specification of a part
        return f"{value['name']}({', '.join(f'{name}={one}' for name, one in value['args'].items())})"
    return value if isinstance(value, str) else json.dumps(value)


def _head(model: nn.Module, folder: Folder, stored: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> WeightMap:
    """The tensors around the stacks, as far as both sides have them, of as many classes."""
    names = folder.architecture.heads.get(type(model))
    head = _complete(weight_map({} if names is None else names(model), state, stored), stored)
    if "head.weight" in head and any(len(stored[name]) != len(state["head.weight"]) for name in head["head.weight"][0]):
        return {name: weight for name, weight in head.items() if not name.startswith("head.")}
    return head


def _complete(weights: WeightMap, stored: Collection[str]) -> WeightMap:
    return {name: weight for name, weight in weights.items() if all(one in stored for one in weight.names)}


def _make(
    weights: WeightMap,
    stored: dict[str, Tensor],
    state: Mapping[str, Tensor],
    folder: Folder,
    dtype: torch.dtype | None,
) -> tuple[dict[str, Tensor], list[str]]:
    """Our tensors made of theirs, and all that is wrong with them; arguments as in `hugging_face_state`."""
    tensors, faults = {}, []
    uses = Counter(name for names, *_ in weights.values() for name in names)
    # The largest first: a copy beside its original is then no more than what is still to come.
    large = {name for name, tensor in state.items() if tensor.nbytes > LARGE}
    for name, (names, make, _) in sorted(weights.items(), key=lambda one: one[0] not in large):
        unfit = list(_unfit(name, names, stored, folder, whole=not state[name].is_floating_point()))
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
        if dtype is not None:
            tensors[name] = _apart(tensors[name], [stored[other] for other in names], dtype)
            uses.subtract(names)
            for other in names:
                if not uses[other]:
                    stored.pop(other, None)
    return tensors, faults


def _apart(tensor: Tensor, parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """A tensor of a type that shares no memory with those that it was made of; whole numbers stay as they are."""
    shares = tensor.untyped_storage().data_ptr() in {part.untyped_storage().data_ptr() for part in parts}
    return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=shares)


def _unfit(
    name: str, names: Iterable[str], stored: Mapping[str, Tensor], folder: Folder, *, whole: bool
) -> Iterator[str]:
    """Yields faults of the tensors that one of ours is made of.

    Args:
        whole: Whether ours counts, as the steps of a batch norm.
    """
    for other in names:
        if other not in stored:
            yield f"{folder} has no {other}, of which {name} is made; fetch it again"
        elif not (stored[other].is_floating_point() or whole):
            yield f"{other} in {folder} is {stored[other].dtype}; give weights that are not quantised"


def _report(weights: WeightMap, stored: Mapping[str, Tensor], state: Mapping[str, Tensor], folder: Folder) -> list[str]:
    taken = {name for names, *_ in weights.values() for name in names}
    left = grouped(stored.keys() - taken, taken)
    fresh = grouped(state.keys() - weights.keys(), weights.keys())
    lines = [f"{folder}: {len(taken)} tensors taken"]
    lines += [f"{folder}: left over: {', '.join(left)}"] if left else []
    return lines + ([f"model: not in {folder}, stays as it was: {', '.join(fresh)}"] if fresh else [])
