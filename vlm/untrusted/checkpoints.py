"""Limits of what a checkpoint file contains, and of what is built from it."""

import os
import zipfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
            raise ValueError("declares more data than it contains")
        if len({member.filename for member in members}) < len(members):
            raise ValueError("has two entries of the same name")
        if damaged := archive.testzip():
            raise ValueError(f"checksum of {damaged}")
        for member in members:
            if member.filename.endswith(".pkl"):
                with archive.open(member) as file:
                    named = set(get_globals_in_pkl(file))
                strange = []
                for name in sorted(named - GLOBALS):
                    kind = name.removeprefix("torch.storage.").removeprefix("torch.")
                    is_type = kind.endswith("Storage") or isinstance(getattr(torch, kind, None), torch.dtype)
                    if not (kind.isidentifier() and is_type):
                        strange.append(name)
                if strange:
                    raise ValueError(f"names {', '.join(strange[:3])}")


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
            if isinstance(value, Tensor):
                plain = value.layout is torch.strided and value.is_cpu and not value.is_quantized
                # An expanded tensor can have any size at no cost, but copying it is expensive.
                if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
                    raise ValueError("a tensor declares more data than it contains")
            elif isinstance(value, int) and value.bit_length() > 64:
                raise ValueError("a number is too large")
        waiting += ((child, depth + 1) for child in inside)
        if values + len(waiting) > MAX_VALUES or depth > MAX_DEPTH or text > MAX_TEXT:
            raise ValueError("unfolds into more than a checkpoint needs")


FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full, torch.arange, torch.linspace)


class SizeLimit(TorchFunctionMode):
    """Stops a specification from allocating more memory, or building more parts, than the stored weights need."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        # Counted by storage, because expanded or shared tensors claim more than the file contains.
        storages = [(tensor.untyped_storage(), tensor.element_size()) for tensor in state.values() if tensor.is_cpu]
        stored = sum({storage.data_ptr(): storage.nbytes() // size for storage, size in storages}.values())
        # A factor of two and a constant leave room for buffers and temporaries.
        self.elements = 2 * stored + 1_000_000
        self.tensors = 2 * len(state) + 100

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FACTORIES:
            sizes = [a for a in args if isinstance(a, int | tuple | list)]
            count = 1
            for size in sizes:
                for side in (size,) if isinstance(size, int) else size:
                    count *= max(1, abs(int(side)))
            self.elements -= count
            self.tensors -= 1
            if min(self.elements, self.tensors) < 0:
                raise ValueError("the specification needs more weights than are stored")
        return func(*args, **(kwargs or {}))
