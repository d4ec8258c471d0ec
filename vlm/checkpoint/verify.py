"""Checks of untrusted checkpoints beyond checksums.

Reading with ``weights_only=True`` executes no code of a file, but a file can still allocate unbounded memory, or expand
to a structure far larger than itself.
"""

import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vlm.errors import UserError

MAX_VALUES = 1_000_000  # in all containers, counted once per reference
MAX_DEPTH = 100
MAX_TEXT = 2**28  # characters
# Globals that a file may name: dictionaries, and tensors with their storages.
GLOBALS = {
    "collections.OrderedDict",
    "builtins.set",
    "torch.Size",
    "torch.device",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
}


def check_archive(path: str | os.PathLike) -> None:
    """Verifies the checksums of a file, and that it does not unpack to more than its size.

    Raises:
        ValueError: It is damaged, claims more than it contains, or names globals that tensors do not need.
        OSError, zipfile.BadZipFile: It cannot be read.
    """
    # Private in torch, as is the format that it reads.
    from torch._weights_only_unpickler import get_globals_in_pkl

    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
        if packed or sum(member.file_size for member in members) > os.path.getsize(path):
            raise ValueError("claims more than it holds")
        if len({member.filename for member in members}) < len(members):
            raise ValueError("holds two entries of one name")
        if damaged := archive.testzip():
            raise ValueError(f"checksum of {damaged}")
        for member in members:
            if member.filename.endswith(".pkl"):
                with archive.open(member) as file:
                    named = set(get_globals_in_pkl(file))
                if strange := sorted(name for name in named if not _known(name)):
                    raise ValueError(f"names {', '.join(strange[:3])}")


def _known(name: str) -> bool:
    kind = name.removeprefix("torch.storage.").removeprefix("torch.")
    is_type = kind.endswith("Storage") or isinstance(getattr(torch, kind, None), torch.dtype)
    return name in GLOBALS or (kind.isidentifier() and is_type)


def check_content(content: Any) -> None:
    """Checks that the loaded contents have a bounded size.

    Raises:
        ValueError: They are too large, or a tensor claims more than it contains.
    """
    values, text = 0, 0
    waiting: list[tuple[Any, int]] = [(content, 0)]
    while waiting:
        value, depth = waiting.pop()
        values += 1
        if isinstance(value, Mapping):
            inside: list[Any] = [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set):
            inside = list(value)
        else:
            inside = []
            text += len(value) if isinstance(value, str) else 0
            _check_leaf(value)
        waiting += ((child, depth + 1) for child in inside)
        if values + len(waiting) > MAX_VALUES or depth > MAX_DEPTH or text > MAX_TEXT:
            raise ValueError("unfolds into more than a checkpoint needs")


def _check_leaf(value: Any) -> None:
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and value.is_cpu and not value.is_quantized
        # An expanded tensor can have any size at no cost, but copying it is expensive.
        if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError("a tensor claims more than it holds")
    elif isinstance(value, int) and value.bit_length() > 64:
        raise ValueError("a number is too large")


@contextmanager
def refusing(path: str | os.PathLike) -> Iterator[None]:
    """Context that converts any error about a checkpoint's contents to a UserError that names the file.

    Raises:
        UserError: Any exception was raised.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as fault:
        reason = (str(fault).strip().splitlines() or [""])[0][:200]
        cause = f"{type(fault).__name__}: {reason}" if reason else type(fault).__name__
        raise UserError(f"{path}: does not hold what vlm writes ({cause}); use another checkpoint") from fault
