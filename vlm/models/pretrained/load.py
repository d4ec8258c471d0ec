"""Loads the weights of a Hugging Face folder into a model of ours with the same tables of names."""

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
from vlm.models.encoder_decoder import ProjectedEncoder
from vlm.models.pretrained.fields import refuse_unread_keys
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.quantised import PARTS, dequantise
from vlm.models.pretrained.specification import neutral_keys, specify
from vlm.models.pretrained.stack import (
    LAYER,
    Part,
    Weight,
    WeightMap,
    compiled,
    patterns_of,
    prefixed,
    sizes_built,
    weight_map,
)
from vlm.models.vit import ViT
from vlm.nn.position import LearnedPositions, regridded


def grouped(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Groups names by the largest module that contains none of the other names; layer numbers become *."""
    parents = {prefix for name in others for prefix in _prefixes(name)}
    groups = Counter(
        re.sub(r"\.\d+(?=\.|$)", ".*", next(prefix for prefix in _prefixes(name) if prefix not in parents))
        for name in names
    )
    return [f"{group} ({count} {'tensor' if count == 1 else 'tensors'})" for group, count in sorted(groups.items())]


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


SIZES = ("dim", "num_heads", "mlp_ratio")  # set once in the config, under model.size
# Never compared: values that show in the tensors, and the image size, to which positions are interpolated.
NEVER = ("prefix", "vocabulary_head", "context_dim", "image_size")
POSITIONS = "positions.weight"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # types of weights
WHOLE = (torch.int64, torch.int32)  # types of counters
SHOWN = 20  # maximum number of errors in a message
LARGE = 2**26  # minimum size in bytes of tensors that are copied first
# Remedies for values that other parts of the config depend on.
REMEDIES = {
    "vocab_size": "choose the tokenizer it was trained with, of {} tokens",
    "max_len": "set data.max_len={} or less",
    "stem": "choose model/encoder=vit",
}


def load_hugging_face(model: nn.Module, folder: Folder) -> list[str]:
    """Copies the weights of a folder into a model with the same sizes.

    Args:
        model: A stack that the folder has, or a model that contains it. Parameters that the folder lacks are unchanged.
    Returns:
        Lines that report how many tensors were copied, and those left over on either side.
    Raises:
        UserError: The folder cannot be read, or does not match the model; the message has a line for each mismatch.
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
    """The weights that `load_hugging_face` copies, by our names, and its lines; the model may be on "meta".

    Args:
        stored: The folder's weights, if they are already read.
        dtype: Type to which weights are copied. Each weight is then removed from `stored` once copied, so that memory
            does not hold all weights twice. None keeps their types and may keep them memory-mapped.
    Raises:
        UserError: As in `load_hugging_face`.
    """
    placed = _placed(model, folder)
    _refuse([fault for one in placed for fault in one.faults(folder, placed)])
    for one in placed:
        refuse_unread_keys(one.part.config, neutral_keys(folder))
    stored = folder.weights() if stored is None else stored
    faults = [*_rename(stored, folder), *dequantise(stored, folder.config, dtype or torch.float32)]
    state, weights, complete = model.state_dict(), WeightMap(), _is_complete(model, folder)
    for one in placed:
        weights |= one.weights(stored, complete=complete)
        faults += one.foreign(stored, folder)
    weights = folder.architecture.adjust(weights, stored)
    weights |= _head(model, folder, stored, state, complete=complete)
    faults += _unknown(placed, weights, stored, folder)
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
    """A stack of the model with the part of the folder that describes it.

    Args:
        ours: Prefix of its names in the model, such as "", "encoder." or "decoder.".
    """

    module: Any
    ours: str
    part: Part

    def faults(self, folder: Folder, placed: list["_Placed"]) -> Iterator[str]:
        """Yields a line with a remedy for each size in which model and folder differ."""
        first = placed[0].part.stack.arguments(placed[0].part.config)
        built = sizes_built(self.module)
        for name, value in self.part.stack.arguments(self.part.config).items():
            # A model for shorter texts needs only the first positions.
            fits = built[name] <= value if name == "max_len" else name in NEVER or built.get(name, value) == value
            if not fits:
                remedy = _remedy(self, name, value, encoder=first.get(name), alone=len(placed) == 1)
                yield f"{self.ours}{name} is {_as_text(built[name])}, {folder} has {_as_text(value)}; {remedy}"

    def notes(self, weights: WeightMap, stored: Mapping[str, Tensor], folder: Folder) -> Iterator[str]:
        """Yields a line if positions were interpolated or truncated."""
        name, sizes = f"{self.ours}{POSITIONS}", sizes_built(self.module)
        if isinstance(self.module, ViT):
            theirs = self.part.stack.arguments(self.part.config)["image_size"]
            if (own := sizes.get("image_size")) != theirs:
                yield f"{name}: images are of {own} pixels, in the folder of {theirs}; interpolated"
            return
        other = weights[name].names[0] if name in weights else ""
        if sizes.get("positions") == "learned" and other in stored and (rows := len(stored[other])) > sizes["max_len"]:
            yield f"{folder}: left over: rows {sizes['max_len']} to {rows - 1} of {other}"

    def weights(self, stored: Iterable[str], *, complete: bool) -> WeightMap:
        """The weights of the stack, and of its vocabulary head: all, or without `complete` those that are stored."""
        stack, config, prefix = self.part
        own, theirs = _inside(self.part, stored)
        weights = stack.weights(self.module, {name.removeprefix(theirs) for name in own if name.startswith(theirs)})
        if POSITIONS in weights:
            weights[POSITIONS] = _fitted(self.module, weights[POSITIONS], stack.arguments(config).get("image_size"))
        head = weight_map(stack.head, self.module.state_dict(), own)
        head = head if complete else _complete(head, own)
        if "vocabulary_head.own.weight" in head:  # then the head is not tied to the embedding
            head.pop("token_embed.weight", None)
        return prefixed(weights, self.ours, prefix + theirs) | prefixed(head, self.ours, prefix)

    def foreign(self, stored: Iterable[str], folder: Folder) -> Iterator[str]:
        """Yields a line for each of their modules that our model lacks."""
        own, theirs = _inside(self.part, stored)
        state = {LAYER.sub(".*.", name, count=1) for name in self.module.state_dict()}
        modules = {name.rpartition(".")[0] for name in state}
        for name, other in self.part.stack.names.items():
            paths = other.names if isinstance(other, Weight) else (other,) if isinstance(other, str) else other
            first = f"{theirs}{paths[0]}".replace("*", "0").replace(".{kind}", "")
            if name not in state | modules and (held := [one for one in own if one.startswith(first)]):
                yield f"the model has no {self.ours}{name}, {folder} has {min(held)}; choose model=pretrained"


def _inside(part: Part, stored: Iterable[str]) -> tuple[set[str], str]:
    """Their names without the part's prefix, and the stack's own prefix if the folder was saved with a head."""
    own = {name.removeprefix(part.prefix) for name in stored if name.startswith(part.prefix)}
    return own, part.stack.prefix if any(name.startswith(part.stack.prefix) for name in own) else ""


def _rename(stored: dict[str, Tensor], folder: Folder) -> Iterator[str]:
    """Gives tensors the names of this version; yields a line for each two that would have the same name."""
    for pattern, new in folder.architecture.renamed:
        for name in [*stored]:  # in place, because tensors are removed from `stored`
            current = re.sub(pattern, new, name)
            if current != name and current in stored:
                yield f"{folder} has both {name} and {current}, two names of one tensor; choose another folder"
            stored[current] = stored.pop(name)


def _unknown(
    placed: Iterable[_Placed], weights: WeightMap, stored: Mapping[str, Tensor], folder: Folder
) -> Iterator[str]:
    """Yields a line for each tensor that no table of the architecture names."""
    left = stored.keys() - {name for weight in weights.values() for name in weight.stored}
    patterns = [*folder.architecture.unused]
    for part in folder.parts.values():
        _, theirs = _inside(part, stored)
        # The model may have no place for the text encoder beside an image encoder.
        unplaced = () if any(one.part is part for one in placed) else patterns_of(part.stack.names)
        patterns += (f"{part.prefix}{theirs}{name}" for name in (*part.stack.neutral(part.config), *unplaced))
    known, kind = compiled(patterns), folder.config.values.get("model_type", folder.origin)
    for name in sorted(left):
        if not known.fullmatch(name):
            reason = "is part of weights quantised in a way that cannot be read"
            reason = reason if name.rpartition(".")[2] in PARTS else f"is no tensor of a {kind} that can be read"
            yield f"{name} in {folder} {reason}; choose another folder"


def _fitted(module: nn.Module, weight: Weight, image_size: Any) -> Weight:
    """Adapts positions: a ViT's are interpolated to its grid, learned positions of texts are truncated to max_len.

    Args:
        image_size: Size of the images that the folder's ViT is for.
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
    # An image encoder may be taken from a folder that also has a text encoder.
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
    """The change to the config that fixes a mismatch.

    Args:
        encoder: The encoder's value if the folder has an encoder; model.size has the decoder's if the two differ.
        alone: Whether the folder has only one stack.
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


def _is_complete(model: nn.Module, folder: Folder) -> bool:
    """Returns True if the folder describes a model with a head, of this class."""
    try:
        described = specify(folder).model
    except UserError:  # its head is not supported, but its stacks are
        return False
    return described is not None and described["name"] == type(model).__name__


def _head(
    model: nn.Module, folder: Folder, stored: Mapping[str, Tensor], state: Mapping[str, Tensor], *, complete: bool
) -> WeightMap:
    """The tensors outside the stacks that both sides have; without the head if the number of classes differs.

    Args:
        complete: Whether the folder has to have all of them.
    """
    names = folder.architecture.heads.get(type(model))
    head = weight_map({} if names is None else names(model), state, stored)
    held = {name.rpartition(".")[0] for name in _complete(head, stored)}  # a layer without its bias is damaged
    head = {name: weight for name, weight in head.items() if complete or name.rpartition(".")[0] in held}
    if "head.weight" in head and any(
        len(stored[name]) != len(state["head.weight"]) for name in head["head.weight"].names if name in stored
    ):
        return {name: weight for name, weight in head.items() if not name.startswith("head.")}
    return head


def stored_classes(model: nn.Module, folder: Folder, stored: Mapping[str, Tensor]) -> int | None:
    """Number of classes of the stored head; None if the architecture has no head for this model, or none is stored."""
    names = folder.architecture.heads.get(type(model))
    head = weight_map({} if names is None else names(model), model.state_dict(), stored)
    found = (len(stored[name]) for name in head["head.weight"].names if name in stored) if "head.weight" in head else ()
    return next(iter(found), None)


def _complete(weights: WeightMap, stored: Collection[str]) -> WeightMap:
    return {name: weight for name, weight in weights.items() if all(one in stored for one in weight.names)}


def _make(
    weights: WeightMap,
    stored: dict[str, Tensor],
    state: Mapping[str, Tensor],
    folder: Folder,
    dtype: torch.dtype | None,
) -> tuple[dict[str, Tensor], list[str]]:
    """Converts their tensors to ours; also returns all errors. Arguments as in `hugging_face_state`."""
    tensors, faults = {}, []
    uses = Counter(name for weight in weights.values() for name in weight.stored)
    # The largest are copied first: a copy beside its original then takes no more memory than what is still to come.
    large = {name for name, tensor in state.items() if tensor.nbytes > LARGE}
    for name, weight in sorted(weights.items(), key=lambda one: one[0] not in large):
        names, make = weight.names, weight.read
        unfit = list(_unfit(name, weight, stored, folder, whole=not state[name].is_floating_point()))
        faults += unfit
        if unfit:
            continue
        try:
            tensors[name] = make(*(stored[other] for other in names))
        except (RuntimeError, IndexError, ValueError):  # shapes that cannot even be concatenated
            tensors[name] = torch.empty(0)
        if tensors[name].shape != state[name].shape:
            theirs = " with ".join(f"{other} {tuple(stored[other].shape)}" for other in names)
            faults.append(f"{name} is {tuple(state[name].shape)}, {folder} has {theirs}; choose another folder")
        if dtype is not None:
            tensors[name] = _apart(tensors[name], [stored[other] for other in names], dtype)
            uses.subtract(weight.stored)
            for other in weight.stored:
                if not uses[other]:
                    stored.pop(other, None)
    return tensors, faults


def _apart(tensor: Tensor, parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Converts a tensor to a type, without sharing memory with its parts; integers keep their type."""
    shares = tensor.untyped_storage().data_ptr() in {part.untyped_storage().data_ptr() for part in parts}
    return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=shares)


def _unfit(name: str, weight: Weight, stored: Mapping[str, Tensor], folder: Folder, *, whole: bool) -> Iterator[str]:
    """Yields errors in the tensors from which one of ours is made.

    Args:
        whole: Whether ours may be an integer, such as the number of batches of a batch norm.
    """
    for other in weight.names:
        if other not in stored:
            yield f"{folder} has no {other}, of which {name} is made; fetch it again"
        elif (dtype := stored[other].dtype) not in (WHOLE if whole else FLOATS):
            yield f"{other} in {folder} is {dtype}; give weights that are not quantised"
    for copy, other in weight.copies:
        if stored[copy].dtype != stored[other].dtype or not torch.equal(stored[copy], stored[other]):
            yield f"{copy} and {other} in {folder} differ; our model has one tensor for both; choose another folder"


def _report(weights: WeightMap, stored: Mapping[str, Tensor], state: Mapping[str, Tensor], folder: Folder) -> list[str]:
    taken = {name for weight in weights.values() for name in weight.stored}
    left = grouped(stored.keys() - taken, taken)
    fresh = grouped(state.keys() - weights.keys(), weights.keys())
    lines = [f"{folder}: {len(taken)} tensors taken"]
    lines += [f"{folder}: left over: {', '.join(left)}"] if left else []
    return lines + ([f"model: not in {folder}, stays as it was: {', '.join(fresh)}"] if fresh else [])
