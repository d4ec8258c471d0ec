"""Loads models from checkpoints, with the base weights and adapters that they name."""

import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlm.checkpoint.file import locate, read_file, weights
from vlm.checkpoint.locate import PREFIX, fetched
from vlm.checkpoint.rebuild import NoDraws, SizeLimit, rebuild, rebuild_shapes, refusing
from vlm.errors import UserError
from vlm.models.pretrained.load import hugging_face_state
from vlm.models.pretrained.opened import is_published, opened
from vlm.nn.lora import is_adapter, merge

ADAPTERS = "adapters"  # entry of a checkpoint that holds only adapters


def base_weights(model: nn.Module, part: str, path: Path) -> tuple[dict[str, Tensor], str]:
    """Returns a file's weights for a part of a model, by the model's names, and the hash of all its weights.

    Args:
        model: The model; it may be on "meta", without weights.
        part: Name of the part; "" for the whole model.
        path: A checkpoint, or a Hugging Face folder.
    Raises:
        UserError: They cannot be read, or do not fit.
    """
    inner, prefix = model.get_submodule(part), f"{part}." if part else ""
    stored: Mapping[str, Tensor]
    if is_published(path):
        folder = opened(path)
        stored = folder.weights()
        tensors, _ = hugging_face_state(inner, folder, stored)
    else:
        loaded = read_file(path)
        if ADAPTERS in loaded["vlm"]:
            raise UserError(f"{path}: holds only adapters and cannot be a base; vlm import {path} --out whole.ckpt")
        stored = weights(loaded)
        head, fitting = best(stored, inner.state_dict(), part)
        tensors = {name: stored[head + name] for name in fitting}
    return {prefix + name: tensor for name, tensor in tensors.items()}, digest(stored)


def digest(state: Mapping[str, Tensor]) -> str:
    """Returns a hash of the names, types, shapes and values of weights."""
    whole = sha256()
    for name, tensor in sorted(state.items()):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        whole.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return whole.hexdigest()


def find_base(place: str, beside: Path) -> Path:
    """Returns the path of a base: its former path, or beside the adapters; for a model of the hub, in the cache.

    Raises:
        UserError: It is not found.
    """
    if place.startswith(PREFIX):
        return fetched(place, local=True)
    other = beside.with_name(f"base{Path(place).suffix}")
    for path in (Path(place), other):
        if path.exists():
            return locate(path)
    raise UserError(f"{beside}: holds adapters of {place}, which is missing; put it there, or at {other}")


def best(stored: Mapping[str, Tensor], ours: Mapping[str, Tensor], part: str) -> tuple[str, set[str]]:
    """Returns the prefix under which the file holds most of the model's weights, and the names that fit there."""
    fitting = {}
    for head in dict.fromkeys([f"{part}." if part else "", "", *_prefixes(stored)]):
        fitting[head] = {
            name for name, tensor in ours.items() if head + name in stored and stored[head + name].shape == tensor.shape
        }
    head = max(fitting, key=lambda one: sum(ours[name].numel() for name in fitting[one]))
    return head, fitting[head]


def _prefixes(names: Mapping[str, Tensor]) -> Iterator[str]:
    """Yields the prefixes of a model's parts, such as "encoder."."""
    yield from dict.fromkeys(f"{name.partition('.')[0]}." for name in names)


def completed(path: Path, loaded: dict[str, Any], *, merge: bool) -> dict[str, Any]:
    """Adds the weights of the base to a checkpoint of adapters; returns other checkpoints unchanged.

    Args:
        merge: See `vlm.checkpoint.load.read`.
    Raises:
        UserError: The base is missing, or has other weights than the adapters were trained on.
    """
    with refusing(path):
        about = dict(loaded["vlm"])
        entry = about.pop(ADAPTERS, None)
        return loaded if entry is None else _completed(path, loaded | {"vlm": about, ADAPTERS: entry}, merge)


def _completed(path: Path, loaded: dict[str, Any], merged: bool) -> dict[str, Any]:
    model = rebuild_shapes(loaded["vlm"]["model"])
    state: dict[str, Tensor] = {}
    for part, base in sorted(loaded[ADAPTERS]["base"].items()):
        place = find_base(str(base["place"]), path)
        tensors, held = base_weights(model, part, place)
        if held != base["hash"]:
            raise UserError(f"{path}: holds adapters of other weights than {place} has now; restore those of before")
        state |= tensors
    own = weights(loaded) if merged else weights({"state_dict": loaded["state_dict"]})
    state |= own
    loaded[ADAPTERS]["fresh"] = sorted(name for name in own if not is_adapter(name))
    if lacking := sorted(model.state_dict().keys() - state.keys()):
        raise UserError(f"{path}: neither it nor its base has {', '.join(lacking[:3])}; use another checkpoint")
    if merged:
        state = merge(state, float(loaded[ADAPTERS]["scale"]))
        loaded.pop("ema", None)  # already merged
    return loaded | {"state_dict": {f"model.{name}": tensor for name, tensor in state.items()}}


def based(model: nn.Module, places: Mapping[str, str]) -> tuple[dict[str, dict[str, str]], set[str]]:
    """Returns the bases of a newly started model, for a checkpoint, and the names of the weights that come from them.

    Args:
        places: See `vlm.checkpoint.start.start_from`.
    Raises:
        UserError: A base itself has adapters.
    """
    state, held, bases = dict(model.named_parameters()), set(), {}  # buffers, such as running means, change
    for part, place in sorted(places.items()):
        path = locate(place)
        tensors, hashed = base_weights(model, part, path)
        # Weights that were replaced, such as the embedding of another tokenizer, do not belong to the base.
        held |= {name for name, one in tensors.items() if name in state and torch.equal(state[name], one.float())}
        bases[part] = {"place": place if place.startswith(PREFIX) else str(path.resolve()), "hash": hashed}
    return bases, held


def as_one(path: Path, loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint whose adapters are merged into the weights, without training state.

    Raises:
        UserError: It has no adapters.
    """
    if ADAPTERS not in loaded:
        raise UserError(f"{path}: has no adapters to merge; use it as it is")
    return {name: loaded[name] for name in ("format", "vlm", "state_dict", "global_step", "epoch")}


__all__ = ["build_model", "load_model", "locate", "read", "weights"]


def read(path: str | os.PathLike, *, merge: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Reads a checkpoint with `read_file`; adds the weights of the base to a checkpoint of adapters.

    Args:
        merge: Whether to merge adapters into the weights, for inference; else they stay separate, for training.
        dtype: See `read_file`.
    Raises:
        UserError: As in `read_file`, or the base of adapters is missing or different.
    """
    path = locate(path)
    return completed(path, read_file(path, dtype), merge=merge)


def build_model(checkpoint: Mapping[str, Any], *, trust: str | Sequence[str] | None = None) -> nn.Module:
    """Builds the model of a checkpoint, bounded by the size of its weights, which are not loaded.

    Args:
        trust: Packages of the user whose classes are allowed too.
    Raises:
        UserError: The checkpoint names forbidden classes, or its specification is larger than its weights.
    """
    return _built(checkpoint, trust, weights(checkpoint))


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
        state = weights(checkpoint)
        with torch.no_grad(), NoDraws():
            model = _built(checkpoint, trust, state)
        # Assigned, not copied, because a copy would need memory for all weights twice.
        whole = {name: tensor.dtype for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
        model.load_state_dict({name: tensor.to(whole.get(name, dtype)) for name, tensor in state.items()}, assign=True)
    except UserError:
        raise
    except Exception as fault:
        raise _misfit(fault) from fault
    return model.to(dtype).eval()


def _built(checkpoint: Mapping[str, Any], trust: str | Sequence[str] | None, state: Mapping[str, Tensor]) -> nn.Module:
    try:
        with SizeLimit(state):
            return rebuild(checkpoint["vlm"]["model"], trust=trust)
    except UserError:
        raise
    except Exception as fault:  # a specification may be arbitrary and break a constructor in any way
        raise _misfit(fault) from fault


def _misfit(fault: Exception) -> UserError:
    reason = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
    return UserError(f"the checkpoint's weights and specification do not fit ({reason}); use another checkpoint")
