"""Files of checkpoints: read, verified, executing nothing.

A file is Lightning's, with `format` and one more entry, `vlm`, that holds all that using the model needs: its
specification, tokenizer, preprocessing, resolved config and scores.
"""

import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlm.checkpoint.hub import fetched
from vlm.checkpoint.hugging_face import from_folder
from vlm.checkpoint.runs import in_run
from vlm.checkpoint.specification import from_specification, is_specified
from vlm.checkpoint.verify import check_archive, check_content, check_sizes, refusing
from vlm.config.names import FORMAT
from vlm.errors import UserError
from vlm.models.pretrained.folder import Folder, is_folder


def locate(place: str | os.PathLike) -> Path:
    """The file of a checkpoint: the place itself, the best one of a run's folder, or that of the newest run of `last`.

    A model of the Hugging Face hub is downloaded, and is then a folder.

    Raises:
        UserError: It cannot be downloaded, or looked at, for want of permission or by its length.
    """
    return in_run(fetched(place))


def read_file(path: str | os.PathLike, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Reads a checkpoint of ours to the CPU after checking that every byte is as it was written; executes nothing.

    A Hugging Face folder is read as the checkpoint that it amounts to, a run's folder as its best one.

    Args:
        dtype: Of the weights of a Hugging Face folder, which are stored in any; others stay as they are.
    Raises:
        UserError: There is none, it is no checkpoint of vlm, of another format, or damaged, or a weight is no finite
            number, with which a model makes nothing.
    """
    path = locate(path)
    loaded = _read(path, dtype)
    with refusing(path):  # torch has kinds of numbers that it cannot sum
        for name, tensor in (pair for part in ("state_dict", "ema") for pair in _items(loaded.get(part))):
            if isinstance(tensor, Tensor) and _is_whole(tensor) and not _is_finite(tensor):
                raise UserError(f"{path}: its weights are not finite numbers ({name!s:.100}); use another checkpoint")
    return loaded


def _items(part: Any) -> Iterable[tuple[Any, Any]]:
    return part.items() if isinstance(part, Mapping) else ()


def _read(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    if is_folder(path):
        return from_folder(Folder(path), dtype)
    if is_specified(path):
        return _checked(path, from_specification(path))
    if not path.is_file():
        raise UserError(
            f"{path}: no such checkpoint; give a run's folder, or a .ckpt file as under runs/NAME/TIME/checkpoints/"
        )
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: is not a checkpoint, or was cut short; give a .ckpt file that vlm wrote")
    try:
        check_archive(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        check_content(checkpoint)
    except Exception as fault:
        reason = str(fault) if type(fault) is ValueError else type(fault).__name__
        raise UserError(f"{path}: is damaged or is no checkpoint of vlm ({reason}); use another") from fault
    return _checked(path, checkpoint)


def _checked(path: Path, checkpoint: Any) -> dict[str, Any]:
    """The content of a file or folder, if it is a checkpoint of ours of sane sizes."""
    if not isinstance(checkpoint, dict) or "format" not in checkpoint or "vlm" not in checkpoint:
        raise UserError(f"{path}: was not written by vlm; give a .ckpt file of `vlm train`")
    if checkpoint["format"] != FORMAT:
        raise UserError(
            f"{path}: has format {str(checkpoint['format'])[:20]}, this vlm reads format {FORMAT}; "
            "use the vlm that wrote it, or train anew"
        )
    try:
        check_sizes(checkpoint["vlm"])
    except ValueError as fault:
        raise UserError(f"{path}: {fault}; use another checkpoint") from fault
    return checkpoint


def weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights that evaluation uses (the moving average where there is one), under the model's own names."""
    stored = {**checkpoint["state_dict"], **checkpoint.get("ema", {})}  # counters, say of a batch norm, have no average
    return {name.removeprefix("model."): tensor for name, tensor in stored.items() if name.startswith("model.")}


def _is_finite(tensor: Tensor) -> bool:
    # A sum takes one pass and no memory; that of finite numbers may be too large for one.
    return (tensor.itemsize > 1 and bool(tensor.sum().isfinite())) or bool(tensor.isfinite().all())


def _is_whole(tensor: Tensor) -> bool:
    """False for a tensor that claims more numbers than the file holds; `rebuild` refuses those."""
    return tensor.is_cpu and tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
