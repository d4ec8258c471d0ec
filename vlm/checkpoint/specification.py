"""Reads checkpoints stored without pickle: a folder of safetensors with a JSON specification."""

import json
from pathlib import Path
from typing import Any

from vlm.checkpoint.verify import MAX_TEXT, check_content
from vlm.errors import UserError
from vlm.models.pretrained.folder import Folder

FILE = "vlm.json"


def is_specified(path: Path) -> bool:
    """Returns True for a folder written by `vlm export --to safetensors`."""
    return path.is_dir() and (path / FILE).is_file()


def from_specification(folder: Path) -> dict[str, Any]:
    """Reads the checkpoint in a folder.

    Raises:
        UserError: It is damaged.
    """
    try:
        if (folder / FILE).stat().st_size > MAX_TEXT:
            raise ValueError("it is too large")
        content = json.loads((folder / FILE).read_text(encoding="utf-8"))
        check_content(content)
        about = {"format": content["format"], "vlm": content["vlm"], "global_step": 0, "epoch": -1}
    except (OSError, KeyError, TypeError, RecursionError, ValueError) as fault:
        raise UserError(f"{folder / FILE}: cannot be read ({fault}); export the model again") from fault
    tensors = Folder(folder).weights()
    return about | {"state_dict": {f"model.{name}": tensor for name, tensor in tensors.items()}}
