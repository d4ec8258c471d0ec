"""Reading a local folder of Hugging Face: its config.json, and its safetensors. No pickle is read."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from vlm.errors import UserError


def read_config(folder: str) -> dict[str, Any]:
    """The folder's description of its model.

    Raises:
        UserError: There is none, or it is damaged.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"model.init_from: {folder} has no config.json; give a folder that save_pretrained wrote")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as fault:
        raise UserError(f"model.init_from: {path} cannot be read ({fault}); restore the file") from fault
    if not isinstance(config, dict):
        raise UserError(f"model.init_from: {path} describes no model; restore the file")
    return config


def read_tensors(folder: str) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors.

    Raises:
        UserError: There are none, or they are damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in _weight_files(Path(folder)):
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as fault:
            raise UserError(f"model.init_from: {path} cannot be read ({fault}); fetch it again") from fault
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            return [folder / Path(name).name for name in names]  # the name alone: a shard lies beside its index
        except (OSError, RecursionError, ValueError, KeyError, TypeError, AttributeError) as fault:
            raise UserError(f"model.init_from: {index} cannot be read ({fault!r}); fetch it again") from fault
    if any(folder.glob("pytorch_model*.bin*")):
        raise UserError(
            f"model.init_from: {folder} holds only pytorch_model.bin, a pickle, which is not read; convert it:\n"
            f"  python -c \"import transformers as t; t.{_class_name(folder)}.from_pretrained('{folder}')"
            f".save_pretrained('{folder}')\""
        )
    raise UserError(f"model.init_from: {folder} has no model.safetensors; give a folder that save_pretrained wrote")


def _class_name(folder: Path) -> str:
    named = (read_config(str(folder)).get("architectures") or ["AutoModel"])[0]
    return named if isinstance(named, str) and named.isidentifier() else "AutoModel"
