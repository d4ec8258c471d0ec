"""Reads checkpoint files safely, and writes them atomically."""

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vlm.checkpoint.locate import download, find_best_checkpoint, missing_checkpoint_error
from vlm.checkpoint.rebuild import convert_errors
from vlm.checkpoint.stored import FORMAT, Checkpoint
from vlm.errors import UserError
from vlm.io.files import atomic_write, remove_unfinished
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import is_published, open_folder
from vlm.untrusted.checkpoints import MAX_TEXT, check_archive, check_content
from vlm.untrusted.sizes import check_sizes

FILE = "vlm.json"


def is_specified(path: Path) -> bool:
    """Returns True for a folder written by `vlm export --to safetensors`."""
    return path.is_dir() and (path / FILE).is_file()


def read_specification(folder: Path) -> Checkpoint:
    """Reads the checkpoint in a folder.

    Raises:
        UserError: It is damaged.
    """
    try:
        if (folder / FILE).stat().st_size > MAX_TEXT:
            raise ValueError("it is too large")
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        check_content(content)
        format_number, about = content["format"], content["vlm"]
    except (OSError, KeyError, TypeError, RecursionError, ValueError) as fault:
        raise UserError(f"{folder / FILE}: cannot be read ({fault}); export the model again") from fault
    tensors = Folder(folder).read_weights()
    state = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return {"format": format_number, "vlm": about, "global_step": 0, "epoch": -1, "state_dict": state}


def write(path: str | os.PathLike, checkpoint: Mapping[str, Any], *, keep: Path | None = None) -> None:
    """Writes a checkpoint to a temporary file, syncs it and renames it, so that a kill leaves the old one intact.

    Args:
        keep: New name for the old checkpoint; default is to replace it.
    Raises:
        UserError: The disk is full or the folder is not writable; the old checkpoint is not changed.
    """
    path, content = Path(path), dict(checkpoint)
    about = content.get("vlm")
    if isinstance(about, dict) and isinstance(state := about.get("tokenizer"), dict):
        content["vlm"] = {**about, "tokenizer": dict(state)}  # without the tokenizer of a `BuiltTokenizerState`
    try:
        remove_unfinished(path.parent, path.name)
        with atomic_write(path, keep=keep) as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as fault:  # torch's writer reports a full disk as a RuntimeError
        cause: BaseException | None = fault
        while cause is not None and not isinstance(cause, OSError):  # torch may hide the system's error behind another
            cause = cause.__context__
        reason = (cause.strerror if isinstance(cause, OSError) else None) or str(fault).splitlines()[0]
        raise UserError(
            f"{path}: cannot write the checkpoint ({reason}); free space or choose another folder", 1
        ) from fault


GRAPHS_DESCRIPTION = "graphs.json"  # in a folder of graphs written by `vlm export`


def locate(place: str | os.PathLike) -> Path:
    """Finds a checkpoint: the file itself, the best one of a run's folder, or that of the newest run for `last`.

    A model of the Hugging Face hub is downloaded to a folder.

    Raises:
        UserError: It cannot be downloaded or accessed.
    """
    return find_best_checkpoint(download(place))


def read_file(path: str | os.PathLike, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Reads a checkpoint to the CPU after verifying its checksums; executes no code of the file.

    A Hugging Face folder is converted to a checkpoint, a run's folder means its best checkpoint.

    Args:
        dtype: Type of the weights of a Hugging Face folder, as in `convert_hugging_face`; weights of other checkpoints
            are not converted.
    Raises:
        UserError: It does not exist, is not a checkpoint of this format, is damaged, or has weights that are not
        finite.
    """
    path = locate(path)
    loaded = _read(path, dtype)
    with convert_errors(path):  # torch cannot sum some types
        parts = [part for part in (loaded.get("state_dict"), loaded.get("ema")) if isinstance(part, Mapping)]
        for name, tensor in (item for part in parts for item in part.items()):
            if not isinstance(tensor, Tensor) or not tensor.is_cpu:
                continue
            if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():  # `rebuild` refuses it
                continue
            # A sum takes one pass and no memory, but may overflow for finite numbers. For 8-bit floats, torch 2.11 has
            # neither sum nor isfinite.
            if tensor.is_quantized:
                values = tensor.q_per_channel_scales()
            else:
                values = tensor.float() if tensor.itemsize == 1 else tensor
            if not values.sum().isfinite() and not values.isfinite().all():
                raise UserError(f"{path}: its weights are not finite numbers ({name!s:.100}); use another checkpoint")
    return loaded


def _read(path: Path, dtype: torch.dtype) -> Checkpoint:
    if is_published(path):
        from vlm.checkpoint.hugging_face import from_folder  # imports readers that our own files need not

        return from_folder(open_folder(path), dtype)
    if is_specified(path):
        return _check_format(path, read_specification(path))
    if (path / GRAPHS_DESCRIPTION).is_file():
        raise UserError(f"{path}: holds graphs for other programs; give the checkpoint from which they were exported")
    if not path.is_file():
        raise missing_checkpoint_error(path)
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: is not a checkpoint, or is incomplete; give a .ckpt file written by vlm")
    try:
        check_archive(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        check_content(checkpoint)
    except Exception as fault:
        reason = str(fault) if type(fault) is ValueError else type(fault).__name__
        raise UserError(f"{path}: is damaged or not a checkpoint of vlm ({reason}); use another") from fault
    return _check_format(path, checkpoint)


def _check_format(path: Path, checkpoint: Any) -> Checkpoint:
    """Checks the contents of a checkpoint."""
    if not isinstance(checkpoint, dict) or "format" not in checkpoint or "vlm" not in checkpoint:
        raise UserError(f"{path}: was not written by vlm; give a .ckpt file of `vlm train`")
    if checkpoint["format"] != FORMAT:
        raise UserError(
            f"{path}: has format {str(checkpoint['format'])[:20]}, but this vlm reads format {FORMAT}; "
            "use the vlm that wrote it, or train again"
        )
    try:
        check_sizes(checkpoint["vlm"])
    except ValueError as fault:
        raise UserError(f"{path}: {fault}; use another checkpoint") from fault
    return cast(Checkpoint, checkpoint)


def inference_weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the weights for inference (the moving average if there is one), by the model's names."""
    stored = {**checkpoint["state_dict"], **checkpoint.get("ema", {})}  # buffers such as counters have no average
    return {name.removeprefix("model."): tensor for name, tensor in stored.items() if name.startswith("model.")}
