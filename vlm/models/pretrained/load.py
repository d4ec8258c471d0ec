"""Opens published weights, a Hugging Face folder or a GGUF file, and loads them into a model of ours."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path

import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.decoder import TextDecoder
from vlm.models.pretrained.adapted import AdaptedFolder
from vlm.models.pretrained.fields import refuse_unread_keys
from vlm.models.pretrained.folder import CONFIG, Folder, collect_neutral_keys, dequantise, specify
from vlm.models.pretrained.gguf.file import GGUF, SUFFIX, LazyTensors, read_ahead
from vlm.models.pretrained.gguf.pair import GGUFPair
from vlm.models.pretrained.match import MatchedStack, find_unknown_tensors, match_stacks, select_complete
from vlm.models.pretrained.place import split_adapters, split_pair
from vlm.models.pretrained.stack import (
    Weight,
    WeightMap,
    map_weights,
)
from vlm.nn.step.packed import allocate_int8, list_int8_weights, quantize_weight


def is_published(path: Path) -> bool:
    """Returns True for a Hugging Face folder, with adapters or without, a GGUF file, or two of them."""
    if split_adapters(path) is not None:
        return True
    if (pair := split_pair(path)) is not None:
        return all(file.is_file() for file in pair)
    return (path.suffix.lower() == SUFFIX and path.is_file()) or (path.is_dir() and (path / CONFIG).exists())


def open_folder(path: str | Path) -> Folder:
    """Opens a Hugging Face folder, or a GGUF file with the same interface.

    Two GGUF files are joined by `join_pair`, a folder and its adapters by `join_adapters`.

    Raises:
        UserError: The file cannot be read.
    """
    if (folders := split_adapters(path)) is not None:
        return AdaptedFolder(*folders)
    if is_published(Path(path)) and (pair := split_pair(path)) is not None:
        return GGUFPair(*pair)
    return GGUF(path) if Path(path).suffix.lower() == SUFFIX and Path(path).is_file() else Folder(path)


def group_names(names: Iterable[str], excluded: Iterable[str]) -> list[str]:
    """Groups names by the largest module that contains none of the excluded names; layer numbers become *."""
    parents = {prefix for name in excluded for prefix in _list_prefixes(name)}
    groups = Counter(
        re.sub(r"\.\d+(?=\.|$)", ".*", next(prefix for prefix in _list_prefixes(name) if prefix not in parents))
        for name in names
    )
    return [f"{group} ({count} {'tensor' if count == 1 else 'tensors'})" for group, count in sorted(groups.items())]


def _list_prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # types of weights
INTEGERS = (torch.int64, torch.int32)  # types of counters
MAX_ERRORS = 20  # maximum number of errors in a message
LARGE = 2**26  # minimum size in bytes of tensors that are copied first


def load_hugging_face(model: nn.Module, folder: Folder) -> list[str]:
    """Copies the weights of a folder into a model with the same sizes.

    Args:
        model: A stack that the folder has, or a model that contains it. Parameters that the folder lacks are unchanged.
    Returns:
        Lines that report how many tensors were copied, and those left over on either side.
    Raises:
        UserError: The folder cannot be read, or does not match the model; the message has a line for each mismatch.
    """
    tensors, lines = convert_hugging_face(model, folder, mapped=True)
    state = model.state_dict()
    with torch.no_grad():
        while tensors:  # each is freed once copied, so that memory does not hold all weights twice
            name, tensor = tensors.popitem()
            state[name].copy_(tensor)
    return lines


def convert_hugging_face(
    model: nn.Module,
    folder: Folder,
    stored: MutableMapping[str, Tensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
    mapped: bool = False,
) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the weights that `load_hugging_face` copies, by our names, and its lines; the model may be on "meta".

    Args:
        stored: The folder's weights, if they are already read.
        dtype: Type to which weights are copied; torch.qint8: those of `list_int8_weights` in 8 bits, embeddings of
            decoders in bfloat16, others in float32. Each weight is then removed from `stored` once copied, so that
            memory does not hold all weights twice. None keeps their types and may keep them memory-mapped.
        mapped: Without `stored`, whether they may stay memory-mapped, as in `Folder.read_weights`.
    Raises:
        UserError: As in `load_hugging_face`.
    """
    stacks = match_stacks(model, folder)
    _raise_errors([fault for stack in stacks for fault in stack.compare_sizes(folder, stacks)])
    for stack in stacks:
        refuse_unread_keys(stack.part.config, collect_neutral_keys(folder))
    stored = folder.read_weights(mapped=mapped) if stored is None else stored
    faults = _rename(stored, folder)
    floats = torch.float32 if dtype in (None, torch.qint8) else dtype
    faults += dequantise(stored, folder.config, floats)
    types: dict[str, torch.dtype] = {}
    if dtype == torch.qint8:
        types = dict.fromkeys(list_int8_weights(model), torch.qint8)
        decoders = [name for name, module in model.named_modules() if isinstance(module, TextDecoder)]
        types |= {f"{name}.token_embed.weight".removeprefix("."): torch.bfloat16 for name in decoders}
    weights, state = _map_weights(model, folder, stacks, stored), model.state_dict()
    faults += [fault for stack in stacks for fault in stack.find_foreign_modules(stored, folder)]
    faults += find_unknown_tensors(stacks, weights, stored, folder)
    loaded = {name for weight in weights.values() for name in weight.all_names}
    lines = [f"{folder}: {len(loaded)} tensors loaded"]
    if unused := group_names(stored.keys() - loaded, loaded):
        lines.append(f"{folder}: unused: {', '.join(unused)}")
    if missing := group_names(state.keys() - weights.keys(), weights.keys()):
        lines.append(f"model: not in {folder}, unchanged: {', '.join(missing)}")
    lines += [line for stack in stacks for line in stack.report_resizing(weights, stored, folder)]
    tensors, more = _convert_tensors(weights, stored, state, folder, None if dtype is None else floats, types)
    _raise_errors(faults + more)
    return tensors, lines


def read_named_weights(folder: Folder) -> MutableMapping[str, Tensor]:
    """Returns all weights of a folder, dequantised and memory-mapped, by the names that the tables use.

    Raises:
        UserError: The folder cannot be read.
    """
    stored = folder.read_weights(mapped=True)
    faults = _rename(stored, folder)
    _raise_errors([*faults, *dequantise(stored, folder.config, torch.float32)])
    return stored


def map_folder(model: nn.Module, folder: Folder) -> tuple[WeightMap, MutableMapping[str, Tensor]]:
    """Returns the stored form of each of a model's weights, and the folder's tensors by the names that it uses.

    Raises:
        UserError: The folder cannot be read, or the model has other stacks.
    """
    stored = folder.read_weights()
    _raise_errors(_rename(stored, folder))
    return _map_weights(model, folder, match_stacks(model, folder), stored), stored


def _rename(stored: MutableMapping[str, Tensor], folder: Folder) -> list[str]:
    """Gives tensors the names that the tables of the architecture use, in place; returns errors."""
    faults = []
    for name in [*stored]:
        if (current := folder.architecture.rename(name)) == name:
            continue
        if current in stored:
            both = f"{folder} has both {name} and {current}"
            faults.append(f"{both}, two names of the same tensor; choose another folder")
        stored[current] = stored.pop(name)
    return faults


def _map_weights(
    model: nn.Module, folder: Folder, stacks: Iterable[MatchedStack], stored: Mapping[str, Tensor]
) -> WeightMap:
    try:
        specified = specify(folder).model
    except UserError:  # its head is not supported, but its stacks are
        specified = None
    complete = specified is not None and specified["name"] == type(model).__name__  # the folder has a head for it
    weights = WeightMap()
    for stack in stacks:
        weights |= stack.map_weights(stored, complete=complete)
    weights = folder.architecture.adjust(weights, stored)
    return weights | _map_head(model, folder, stored, model.state_dict(), complete=complete)


def _raise_errors(faults: list[str]) -> None:
    lines = faults[:MAX_ERRORS] + ([f"{len(faults) - MAX_ERRORS} more"] if len(faults) > MAX_ERRORS else [])
    if lines:
        raise UserError("\n".join(lines))


def _map_head(
    model: nn.Module, folder: Folder, stored: Mapping[str, Tensor], state: Mapping[str, Tensor], *, complete: bool
) -> WeightMap:
    """Maps the tensors outside the stacks that both sides have; without the head if the number of classes differs.

    Args:
        complete: Whether the folder has to have all of them.
    """
    names = folder.architecture.heads.get(type(model))
    head = map_weights({} if names is None else names(model), state, stored)
    layers = {name.rpartition(".")[0] for name in select_complete(head, stored)}  # a missing bias is an error
    head = {name: weight for name, weight in head.items() if complete or name.rpartition(".")[0] in layers}
    if "head.weight" in head and any(
        len(stored[name]) != len(state["head.weight"]) for name in head["head.weight"].names if name in stored
    ):
        return {name: weight for name, weight in head.items() if not name.startswith("head.")}
    return head


def count_stored_classes(model: nn.Module, folder: Folder, stored: Mapping[str, Tensor]) -> int | None:
    """Returns the number of classes of the stored head; None if the architecture or the folder has no such head."""
    names = folder.architecture.heads.get(type(model))
    head = map_weights({} if names is None else names(model), model.state_dict(), stored)
    names_of_head = head["head.weight"].names if "head.weight" in head else ()
    return next((len(stored[name]) for name in names_of_head if name in stored), None)


def _convert_tensors(
    weights: WeightMap,
    stored: MutableMapping[str, Tensor],
    state: Mapping[str, Tensor],
    folder: Folder,
    dtype: torch.dtype | None,
    types: Mapping[str, torch.dtype],
) -> tuple[dict[str, Tensor], list[str]]:
    """Converts their tensors to ours; also returns all errors.

    Args:
        weights, stored, state, folder: As in `convert_hugging_face`.
        dtype: Type to which they are copied; None: not copied.
        types: Types of those, by our names, that are copied to another one.
    """
    tensors, faults = {}, []
    uses = Counter(name for weight in weights.values() for name in weight.all_names)
    # Largest first: a copy and its original then take no more memory than the tensors that are still to come.
    large = {name for name, tensor in state.items() if tensor.nbytes > LARGE}
    ordered = sorted(weights.items(), key=lambda item: item[0] not in large)
    copies: dict[str, Tensor] = {}
    if dtype is not None and isinstance(stored, LazyTensors):  # of a file whose shapes have been checked
        # Allocated before anything is read, because results between temporary tensors would fragment their memory.
        copies = {name: _allocate(state[name], types.get(name, dtype)) for name in weights}

    def read_sources(item: tuple[str, Weight]) -> dict[str, Tensor]:
        return {source: stored[source] for source in item[1].all_names if source in stored}

    for (name, weight), sources in zip(ordered, read_ahead(read_sources, ordered), strict=True):
        names, make = weight.names, weight.read
        tensor_faults = list(_check_tensors(name, weight, sources, folder, integer=not state[name].is_floating_point()))
        faults += tensor_faults
        if tensor_faults:
            continue
        try:
            tensors[name] = make(*(sources[source] for source in names))
        except (RuntimeError, IndexError, ValueError):  # shapes that cannot even be concatenated
            tensors[name] = torch.empty(0)
        if tensors[name].shape != state[name].shape:
            theirs = " with ".join(f"{source} {tuple(sources[source].shape)}" for source in names)
            faults.append(f"{name} is {tuple(state[name].shape)}, {folder} has {theirs}; choose another folder")
            continue
        if dtype is not None:
            tensor = tensors[name]
            tensors[name] = copies[name] if name in copies else _allocate(state[name], types.get(name, dtype))
            if tensors[name].is_quantized:
                quantize_weight(tensor, out=tensors[name])
            else:
                tensors[name].copy_(tensor)
            del tensor
            uses.subtract(weight.all_names)
            for source in weight.all_names:
                if not uses[source] and source in stored:
                    del stored[source]
    return tensors, faults


def _allocate(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns memory on the CPU for a tensor's values: floats in this type or in 8 bits, integers in their own."""
    if dtype == torch.qint8:
        return allocate_int8(tensor.shape)
    return torch.empty(tensor.shape, dtype=dtype if tensor.is_floating_point() else tensor.dtype)


def _check_tensors(
    name: str, weight: Weight, stored: Mapping[str, Tensor], folder: Folder, *, integer: bool
) -> Iterator[str]:
    """Yields errors in the tensors from which one of ours is made.

    Args:
        integer: Whether ours is an integer, such as the number of batches of a batch norm.
    """
    for source in weight.names:
        if source not in stored:
            yield f"{folder} has no {source}, which {name} needs; download it again"
        elif (dtype := stored[source].dtype) not in (INTEGERS if integer else FLOATS):
            yield f"{source} in {folder} is {dtype}; give weights that are not quantised"
    for copy, original in weight.copies:
        if stored[copy].dtype != stored[original].dtype or not torch.equal(stored[copy], stored[original]):
            yield f"{copy} and {original} in {folder} differ, but our model shares them; choose another folder"
