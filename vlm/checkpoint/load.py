"""Loads models from checkpoints, with the base weights that adapters need."""

import os
from collections.abc import Mapping, MutableMapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from vlm.checkpoint.file import inference_weights, locate, read_file
from vlm.checkpoint.locate import PREFIX, download
from vlm.checkpoint.rebuild import NoDraws, convert_errors, rebuild, rebuild_shapes
from vlm.checkpoint.stored import Base, Checkpoint, Metadata
from vlm.errors import UserError
from vlm.models.pretrained.load import convert_hugging_face, is_published, open_folder, read_named_weights
from vlm.models.pretrained.place import resolve_place
from vlm.models.pretrained.stack import Spec
from vlm.nn.lora import is_adapter, merge_adapters
from vlm.untrusted.checkpoints import SizeLimit

ADAPTERS: Final = "adapters"  # entry of a checkpoint that holds only adapters


def read_base_weights(model: nn.Module, part: str, path: Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Returns a file's weights for a part of a model, by the model's names.

    Args:
        model: The model; it may be on "meta", without weights.
        part: Name of the part; "" for the entire model.
        path: A checkpoint, or a Hugging Face folder.
        mapped: See `Folder.read_weights`.
    Raises:
        UserError: They cannot be read, or do not fit.
    """
    inner, prefix = model.get_submodule(part), f"{part}." if part else ""
    if is_published(path):
        folder = open_folder(path)
        tensors, _ = convert_hugging_face(inner, folder, mapped=mapped)
    else:
        stored = _read_base_checkpoint(path)
        head, fitting = match_part(stored, inner.state_dict(), part)
        tensors = {name: stored[head + name] for name in fitting}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _read_base_checkpoint(path: Path) -> dict[str, Tensor]:
    loaded = read_file(path)
    if ADAPTERS in loaded["vlm"]:
        raise UserError(f"{path}: holds only adapters and cannot be a base; vlm import {path} --out whole.ckpt")
    return inference_weights(loaded)


def hash_base(path: Path) -> str:
    """Returns the hash of all weights of a checkpoint or a Hugging Face folder.

    Raises:
        UserError: They cannot be read.
    """
    return digest(read_named_weights(open_folder(path)) if is_published(path) else _read_base_checkpoint(path))


def digest(state: MutableMapping[str, Tensor]) -> str:
    """Returns a hash of the names, types, shapes and values of weights, which it removes one by one to free them."""
    digest = sha256()
    for name in sorted(state):
        tensor = state.pop(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find_base(place: str, adapters: Path) -> Path:
    """Returns the path of a base: its former path, or next to the adapters; for a model of the hub, in the cache.

    Raises:
        UserError: It is not found.
    """
    if place.startswith(PREFIX):
        return download(place, local=True)
    neighbour = adapters.with_name(f"base{Path(place).suffix}")
    for path in (Path(place), neighbour):
        if path.exists() or is_published(path):  # the latter for a folder joined with adapters
            return locate(path)
    raise UserError(f"{adapters}: holds adapters of {place}, which is missing; put it there, or at {neighbour}")


def match_part(stored: Mapping[str, Tensor], ours: Mapping[str, Tensor], part: str) -> tuple[str, set[str]]:
    """Returns the prefix with which the file has most of the model's weights, and the names that fit."""
    fitting = {}
    prefixes = (f"{name.partition('.')[0]}." for name in stored)  # of parts, such as "encoder."
    for head in dict.fromkeys([f"{part}." if part else "", "", *prefixes]):
        fitting[head] = {
            name for name, tensor in ours.items() if head + name in stored and stored[head + name].shape == tensor.shape
        }
    head = max(fitting, key=lambda prefix: sum(ours[name].numel() for name in fitting[prefix]))
    return head, fitting[head]


def _merge_base(path: Path, loaded: Checkpoint, merged: bool) -> Checkpoint:
    """Adds the weights of the base to a checkpoint of adapters.

    Raises:
        UserError: The base is missing, or has other weights than the adapters were trained on.
    """
    model = rebuild_shapes(cast(Spec, loaded["vlm"]["model"]))
    state: dict[str, Tensor] = {}
    for part, base in sorted(loaded[ADAPTERS]["base"].items()):
        place = find_base(str(base["place"]), path)
        if hash_base(place) != base["hash"]:
            raise UserError(
                f"{path}: its adapters were trained on other weights than {place} has now; restore the former weights"
            )
        state |= read_base_weights(model, part, place)
    trained = inference_weights(loaded if merged else {"state_dict": loaded["state_dict"]})
    state |= trained
    loaded[ADAPTERS]["fresh"] = sorted(name for name in trained if not is_adapter(name))
    if lacking := sorted(model.state_dict().keys() - state.keys()):
        raise UserError(
            f"{path}: neither the adapters nor their base have {', '.join(lacking[:3])}; use another checkpoint"
        )
    if merged:
        state = merge_adapters(state, float(loaded[ADAPTERS]["scale"]))
        loaded.pop("ema", None)  # already merged
    return loaded | {"state_dict": {f"model.{name}": tensor for name, tensor in state.items()}}


def describe_bases(model: nn.Module, places: Mapping[str, str]) -> tuple[dict[str, Base], set[str]]:
    """Returns the bases of a newly started model, for a checkpoint, and the names of the weights that come from them.

    Args:
        places: See `vlm.checkpoint.start.start_from`.
    Raises:
        UserError: A base itself has adapters.
    """
    state, names = dict(model.named_parameters()), set[str]()  # buffers, such as running means, change
    bases: dict[str, Base] = {}
    for part, place in sorted(places.items()):
        path = locate(place)
        origin = place if place.startswith(PREFIX) else resolve_place(path)
        bases[part] = {"place": origin, "hash": hash_base(path)}
        tensors = read_base_weights(model, part, path, mapped=True)
        while tensors:  # each is freed once compared
            name, base = tensors.popitem()
            # Weights that were replaced, such as the embedding of another tokenizer, do not belong to the base.
            if name in state and torch.equal(state[name], base.float()):
                names.add(name)
    return bases, names


def strip_training_state(path: Path, loaded: Checkpoint) -> Checkpoint:
    """Returns what inference needs of a checkpoint whose adapters `read` has merged into the weights.

    Raises:
        UserError: It has no adapters.
    """
    if ADAPTERS not in loaded:
        raise UserError(f"{path}: has no adapters to merge; use it as it is")
    return _select_for_inference(loaded)


def _select_for_inference(loaded: Checkpoint) -> Checkpoint:
    return {
        "format": loaded["format"],
        "vlm": loaded["vlm"],
        "state_dict": loaded["state_dict"],
        "global_step": loaded["global_step"],
        "epoch": loaded["epoch"],
    }


# What may differ between checkpoints whose weights are averaged.
_HISTORY = ("config", "data", "decoding", "origin", "base_class", "reference", "scores", "teacher", "typed")


def average_checkpoints(places: Sequence[str]) -> Checkpoint:
    """Returns a checkpoint whose weights are the mean of those of several (a model soup; Wortsman et al. 2022).

    The weights are those for inference, with adapters merged; they are averaged in float64. Everything else is that of
    the first checkpoint, without scores.

    Args:
        places: At least two checkpoints, of one model that was trained further in different ways.
    Raises:
        UserError: One cannot be read, or differs from the first in more than its weights.
    """
    paths = [locate(place) for place in places]
    first = read(paths[0])
    weights = inference_weights(first)
    sums = {name: tensor.double() for name, tensor in weights.items() if tensor.is_floating_point()}
    for path in paths[1:]:
        other = read(path)
        described = other["vlm"]
        for key in sorted({*first["vlm"], *described} - {*_HISTORY}):
            if first["vlm"].get(key) != described.get(key):
                raise UserError(f"{path}: has another {key} than {paths[0]}; average checkpoints of the same model")
        added = inference_weights(other)
        for name in sorted({*weights, *added}):
            if name not in weights or name not in added or weights[name].shape != added[name].shape:
                raise UserError(f"{path}: its {name} does not match that of {paths[0]}; average the same model")
            if name in sums:
                sums[name] += added[name]
            elif not torch.equal(weights[name], added[name]):
                raise UserError(f"{path}: its {name}, whole numbers, differs from that of {paths[0]}")
    mean = {name: (total / len(paths)).to(weights[name].dtype) for name, total in sums.items()}
    averaged = _select_for_inference(first)
    averaged["vlm"] = {**first["vlm"], "scores": {}}
    averaged["state_dict"] = {f"model.{name}": tensor for name, tensor in (weights | mean).items()}
    return averaged


__all__ = ["build_model", "load_model", "locate", "read"]


def read(path: str | os.PathLike, *, merge: bool = True, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Reads a checkpoint with `read_file`; adds the weights of the base to a checkpoint of adapters.

    Args:
        merge: Whether to merge adapters into the weights, for inference; else they stay separate, for training.
        dtype: See `read_file`.
    Raises:
        UserError: As in `read_file`, or the base of adapters is missing or different.
    """
    path = locate(path)
    loaded = read_file(path, dtype)
    with convert_errors(path):
        about = cast(Metadata, dict(loaded["vlm"]))
        entry = about.pop(ADAPTERS, None)
        return loaded if entry is None else _merge_base(path, loaded | {"vlm": about, ADAPTERS: entry}, merge)


def build_model(checkpoint: Mapping[str, Any], *, trust: str | Sequence[str] | None = None) -> nn.Module:
    """Builds the model of a checkpoint, bounded by the size of its weights, which are not loaded.

    Args:
        trust: Packages of the user whose classes are allowed too.
    Raises:
        UserError: The checkpoint names forbidden classes, or its specification is larger than its weights.
    """
    return _build(checkpoint, trust, inference_weights(checkpoint))


def load_model(
    checkpoint: Mapping[str, Any], *, trust: str | Sequence[str] | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """Rebuilds the model of a checkpoint with its weights, in evaluation mode.

    Args:
        dtype: Type of weights and states.
        trust: Packages of the user whose classes are allowed too.
    Raises:
        UserError: As in `build_model`, or the weights do not match the specification.
    """
    try:
        state = inference_weights(checkpoint)
        with torch.no_grad(), NoDraws():
            model = _build(checkpoint, trust, state)
        # Assigned, not copied, because a copy would need memory for all weights twice.
        integers = {name: tensor.dtype for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
        quantized = [name for name, tensor in state.items() if tensor.is_quantized]
        for name in quantized:
            model.get_parameter(name).requires_grad_(False)  # torch has no gradients for integers
        if not quantized:  # else all have their types: 8 bits, bfloat16 for embeddings, float32
            state = {name: tensor.to(integers.get(name, dtype)) for name, tensor in state.items()}
        model.load_state_dict(state, assign=True)
    except UserError:
        raise
    except Exception as fault:
        raise _mismatch_error(fault) from fault
    return model.eval() if quantized else model.to(dtype).eval()


def _build(checkpoint: Mapping[str, Any], trust: str | Sequence[str] | None, state: Mapping[str, Tensor]) -> nn.Module:
    try:
        with SizeLimit(state):
            return rebuild(checkpoint["vlm"]["model"], trust=trust)
    except UserError:
        raise
    except Exception as fault:  # a specification may be arbitrary and break a constructor in any way
        raise _mismatch_error(fault) from fault


def _mismatch_error(fault: Exception) -> UserError:
    reason = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
    return UserError(f"the checkpoint's weights do not match its specification ({reason}); use another checkpoint")
