"""Checkpoints of adapters only: the weights trained on top of a base model, which is identified by path and hash.

Their entry "adapters" holds {"scale": α/r, "layers": number, "base": {part: {"place": ..., "hash": ...}}}.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlm.checkpoint.base import ADAPTERS, base_weights, find_base
from vlm.checkpoint.file import locate, weights
from vlm.checkpoint.hub import PREFIX
from vlm.checkpoint.rebuild import rebuild_shapes
from vlm.checkpoint.verify import refusing
from vlm.errors import UserError
from vlm.nn.lora import is_adapter, merge


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
