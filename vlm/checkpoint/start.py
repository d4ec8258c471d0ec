"""Initialises a model with the weights of another run, matched by name and shape; reports mismatches.

Position embeddings of patches are interpolated to another image size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from vlm.checkpoint.file import inference_weights
from vlm.checkpoint.load import locate, match_part, read
from vlm.checkpoint.stored import Checkpoint
from vlm.data.text.hugging_face import check_tokens
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import group_names, is_published, load_hugging_face, open_folder
from vlm.nn.image_size import ImageSize
from vlm.nn.position import GridPositions, interpolate_grid


def start_from(
    model: nn.Module, places: Mapping[str, str], tokenizer: Tokenizer | None = None, typed: Sequence[str] = ()
) -> list[str]:
    """Copies weights into a model, or into parts of it.

    Args:
        places: A checkpoint, run's folder or Hugging Face folder, by the part's name; "" is the entire model.
        tokenizer: The run's tokenizer; token embeddings are copied only if they belong to the same one.
        typed: Arguments of the command line, KEY=VALUE; messages name the key with which a place was given.
    Returns:
        Messages about the copied weights, and about each weight that does not match on either side.
    Raises:
        UserError: A file is unreadable, no weight matches, or token ids differ; the message names the key.
    """
    lines = []
    for part, place in sorted(places.items()):
        key = f"model.{part}.init_from" if part else "model.init_from"
        model_options = (text.lstrip("+").partition("=") for text in typed if text.lstrip("+").startswith("model."))
        key = next((name for name, _, value in model_options if value == place), key)
        try:
            inner = model.get_submodule(part)
        except AttributeError as fault:
            raise UserError(f"{key}: the model has no {part}; remove the key") from fault
        path = locate(place)
        if not is_published(path):
            lines += _load_checkpoint(inner, part, key, path, tokenizer)
        else:
            lines += _load_folder(inner, open_folder(path), key, tokenizer)
    return lines


def find_base_class(places: Mapping[str, str], loaded: Checkpoint | None) -> str | None:
    """Returns the Hugging Face class of the folder from which an entire model starts; None if it has none.

    Args:
        places: See `start_from`.
        loaded: The checkpoint of a run that is resumed.
    """
    if loaded is not None:
        return loaded["vlm"].get("base_class")
    path = None if "" not in places else locate(places[""])
    return open_folder(path).origin if path is not None and is_published(path) else None


def _load_folder(model: nn.Module, folder: Folder, key: str, tokenizer: Tokenizer | None) -> list[str]:
    try:
        # An image encoder may come from a folder that also has a text encoder, such as CLIP's.
        images_only = "text_encoder" in folder.parts and not hasattr(model, "text_encoder")
        reads_texts = any(name.endswith("token_embed") for name, _ in model.named_modules())
        if tokenizer is not None and reads_texts and not images_only:
            check_tokens(folder, tokenizer)
        return load_hugging_face(model, folder)
    except UserError as fault:
        lines = str(fault).split("\n")
        raise UserError("\n".join(line if line.startswith(" ") else f"{key}: {line}" for line in lines)) from fault


def _load_checkpoint(model: nn.Module, part: str, key: str, path: Path, tokenizer: Tokenizer | None) -> list[str]:
    loaded = read(path)
    stored, state = inference_weights(loaded), model.state_dict()
    head, fitting = match_part(stored, state, part)
    if not fitting:
        raise UserError(
            f"{key}: no weight in {path} fits {part or 'the model'} ({type(model).__name__}); "
            "give a checkpoint of a model that has this part with the same sizes"
        )
    theirs, foreign = loaded["vlm"].get("tokenizer"), set[str]()  # weights with a row for each of other tokens
    fingerprint = theirs.get("fingerprint") if isinstance(theirs, Mapping) else None
    if tokenizer is not None and fingerprint != tokenizer.fingerprint:
        tables = [f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Embedding)]
        foreign = {name for name in tables if model.get_parameter(name).shape[0] == tokenizer.vocab_size}
    tensors = {name: stored[head + name] for name in fitting - foreign}
    size = loaded["vlm"].get("preprocess", {}).get("image_size", 1)
    tensors |= _interpolate_positions(model, stored, head, size)
    with torch.no_grad():
        for name, tensor in tensors.items():
            state[name].copy_(tensor)
    return list(_report(str(path), part, head, stored, state, set(tensors), foreign))


def _interpolate_positions(
    model: nn.Module, stored: Mapping[str, Tensor], head: str, size: ImageSize
) -> dict[str, Tensor]:
    """Returns position embeddings interpolated from those of another image size, by name.

    Args:
        size: Image size of the stored ones.
    """
    tensors = {}
    for name, positions in model.named_modules():
        table = stored.get(f"{head}{name}.weight") if isinstance(positions, GridPositions) else None
        if table is not None and table.shape[1:] == positions.weight.shape[1:]:
            with suppress(ValueError):  # only one of the two has tokens before the grid
                before = positions.before
                tensors[f"{name}.weight"] = interpolate_grid(table, positions.grid, before=before, image_size=size)
    return tensors


def _report(
    path: str,
    part: str,
    head: str,
    stored: Mapping[str, Tensor],
    ours: Mapping[str, Tensor],
    loaded: set[str],
    foreign: set[str],
) -> Iterator[str]:
    place = part or "model"
    yield f"{path}: {len(loaded)} tensors loaded for {place}"
    for name in sorted(ours.keys() - foreign):
        tensor = stored.get(head + name)
        if tensor is not None and tensor.shape != ours[name].shape:
            shapes = f"{tuple(ours[name].shape)}, in the file {tuple(tensor.shape)}"
            yield f"{place}: {name} is {shapes}; {'interpolated' if name in loaded else 'not loaded'}"
    if tables := sorted(name for name in foreign if head + name in stored):
        yield from (f"{place}: {name} belongs to another tokenizer in the file; not loaded" for name in tables)
        yield f"  to keep that tokenizer, set tokenizer=pretrained tokenizer.path={path}"
    if missing := [name for name in ours if head + name not in stored]:
        yield f"{place}: not in the file, unchanged: {', '.join(group_names(missing, loaded))}"
    if unused := [name for name in stored if not name.startswith(head) or name.removeprefix(head) not in ours]:
        yield f"{path}: unused: {', '.join(group_names(unused, {head + name for name in loaded}))}"
