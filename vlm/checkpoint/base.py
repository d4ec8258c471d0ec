"""Weights of another file that a run starts from, or that adapters belong to."""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn

from vlm.checkpoint.file import locate, read_file, weights
from vlm.checkpoint.hub import PREFIX, fetched
from vlm.errors import UserError
from vlm.models.pretrained.load import hugging_face_state
from vlm.models.pretrained.opened import is_published, opened

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
