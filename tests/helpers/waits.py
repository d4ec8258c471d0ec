"""Counts of operations on CPU tensors that would make the host wait for a GPU."""

from collections import Counter

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
COPIES = ("tensor", "as_tensor", "new_tensor")
# Numbers that go to the host, and results whose size depends on values. In inference mode, operations that consist of
# others come whole: item, is_nonzero, where.
OPERATIONS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique", "lift_fresh")
OVERLOADS = ("where.default", "repeat_interleave.Tensor")


def wait_of(func, args):
    """The name of an operation that would wait for a GPU; None for any other."""
    overload = str(func).removeprefix("aten.")
    name = overload.split(".")[0]
    if name in OPERATIONS or overload in OVERLOADS or name.lstrip("_").startswith("unique"):
        return name
    indices = tree_leaves(args[1]) if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
    by_mask = any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)
    return "index by a bool mask" if by_mask else None


class _Calls(TorchFunctionMode):
    """Calls from Python: on a CPU, reading a list or making a tensor of one passes no operation."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS:
            self.counts[f"read: {name}"] += 1
        if name in COPIES:
            self.counts[f"copy: {name}"] += 1
        if name == "to" and any(isinstance(leaf, torch.device | str) for leaf in tree_leaves((args[1:], kwargs))):
            self.counts["copy: to a device"] += 1
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (name := wait_of(func, args)) is not None:
            self.counts[f"operation: {name}"] += 1
        return func(*args, **(kwargs or {}))


class Waits:
    """Counts, while it is open, what would wait for a GPU: reads, copies to it, results whose size depends on values.

    A tensor of one Python number that an operation takes is none: it travels with the launch.
    """

    def __init__(self):
        self.counts = Counter()
        self._modes = [_Calls(self.counts), _Operations(self.counts)]

    def __enter__(self):
        for mode in self._modes:
            mode.__enter__()
        return self.counts

    def __exit__(self, *fault):
        for mode in reversed(self._modes):
            mode.__exit__(*fault)
