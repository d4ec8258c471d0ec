"""Reading a local folder of Hugging Face: its files of JSON and text, and its safetensors. No pickle is read.

A folder of unknown origin executes nothing, and no link leads out of it.
"""

import json
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from vlm.errors import UserError

AT_ONCE = 2**26  # bytes of weights that are read before their file is opened anew
MAX_TEXT = 2**27  # bytes of a file of text; vocabularies of a quarter million pieces take 20 million
OWN = "vlm_export.json"  # in a folder that we exported: tokenizer and preprocessing as our checkpoints have them
KEY = "model.init_from"  # of the config; stands before each fault
RENAMED = {".gamma": ".weight", ".beta": ".bias"}  # of norms, in folders converted long ago
_RENAMED = re.compile(r"(?<=LayerNorm)(\.gamma|\.beta)$")


def read_config(folder: str) -> dict[str, Any]:
    """The folder's description of its model.

    Raises:
        UserError: There is none, it is damaged, or it asks for code of its own.
    """
    config = read_json(folder, "config.json")
    if config is None:
        raise UserError(f"{KEY}: {folder} has no config.json; give a folder that save_pretrained wrote")
    if "auto_map" in config:
        raise UserError(f"{KEY}: {folder} needs code of its own (auto_map), which is never run; choose another folder")
    return config


def read_json(folder: str, name: str) -> dict[str, Any] | None:
    """The object in a file of JSON; None where there is no such file.

    Raises:
        UserError: It is damaged, too large, or lies elsewhere.
    """
    text = read_text(folder, name)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (RecursionError, ValueError) as fault:
        raise UserError(f"{KEY}: {Path(folder) / name} cannot be read ({fault}); restore the file") from fault
    if not isinstance(content, dict):
        raise UserError(f"{KEY}: {Path(folder) / name} cannot be read (it holds no object); restore the file")
    return content


def read_text(folder: str, name: str) -> str | None:
    """A file of text, its line ends as they are; None where there is no such file.

    Raises:
        UserError: It is no UTF-8, too large, or lies elsewhere.
    """
    path = inside(folder, name)
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_TEXT:
            raise ValueError(f"it has more than {MAX_TEXT:,} bytes")
        return path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as fault:
        raise UserError(f"{KEY}: {path} cannot be read ({fault}); restore the file") from fault


def inside(folder: str, name: str) -> Path:
    """The path of a file of the folder, which may lie among the blobs of a download of huggingface_hub.

    Raises:
        UserError: It is a link to a place outside.
    """
    path, root = Path(folder) / name, Path(folder).resolve()
    blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else root
    target = path.resolve()
    if not (target.is_relative_to(root) or target.is_relative_to(blobs)):
        raise UserError(f"{KEY}: {path} is a link out of the folder, which is not followed; put the file there")
    return path


def read_tensors(folder: str, *, mapped: bool = False) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors, norms named as they are now.

    Args:
        mapped: Whether they stay in the files, for one who copies them at once: a file that is cut short while its
            tensors are in use ends the process.
    Raises:
        UserError: There are none, or they are damaged.
    """
    from safetensors import SafetensorError

    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            tensors |= {name: tensor if mapped else tensor.clone() for name, tensor in _tensors(path)}
        except (OSError, SafetensorError) as fault:
            raise UserError(f"{KEY}: {path} cannot be read ({fault}); fetch it again") from fault
    return {_RENAMED.sub(lambda match: RENAMED[match[0]], name): tensor for name, tensor in tensors.items()}


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of a file, which take memory once they are read, until all of AT_ONCE are let go."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = deque(file.keys())
    while names:
        with safe_open(path, framework="pt") as file:
            read = 0
            while names and read < AT_ONCE:
                tensor = file.get_tensor(names[0])
                read += tensor.nbytes
                yield names.popleft(), tensor


def _weight_files(folder: str) -> list[Path]:
    whole, index = inside(folder, "model.safetensors"), "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    listed = read_json(folder, index)
    if listed is not None:
        try:
            names = sorted(set(listed["weight_map"].values()))
            return [inside(folder, Path(name).name) for name in names]  # the name alone: it lies beside its index
        except (KeyError, TypeError, AttributeError) as fault:
            raise UserError(f"{KEY}: {Path(folder) / index} cannot be read ({fault!r}); fetch it again") from fault
    if any(Path(folder).glob("pytorch_model*.bin*")):
        raise UserError(
            f"{KEY}: {folder} holds only pytorch_model.bin, a pickle, which is not read; convert it:\n"
            f"  python -c \"import transformers as t; t.{_class_name(folder)}.from_pretrained('{folder}')"
            f".save_pretrained('{folder}')\""
        )
    raise UserError(f"{KEY}: {folder} has no model.safetensors; give a folder that save_pretrained wrote")


def _class_name(folder: str) -> str:
    named = (read_config(folder).get("architectures") or ["AutoModel"])[0]
    return named if isinstance(named, str) and named.isidentifier() else "AutoModel"
