"""Rebuilds models from names and plain arguments, bounded by the size of the stored weights."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vlm.config.names import MODELS, modules
from vlm.config.target import suggest_trust
from vlm.errors import UserError

MAX_PARTS = 1000  # of a specification, which may refer to the same part repeatedly


def rebuild(spec: Mapping[str, Any], *, trust: str | Sequence[str] | None = None) -> nn.Module:
    """Builds a module from {"name": "ViT", "args": {...}}; arguments may be such nodes too.

    Args:
        trust: Packages of the user whose classes are allowed too.
    Raises:
        UserError: A name is not a module class of vlm.models, vlm.nn or a trusted package.
    """
    return _build(spec, (trust,) if isinstance(trust, str) else tuple(trust or ()), count())


def _build(spec: Mapping[str, Any], trust: Sequence[str], built: Iterator[int]) -> nn.Module:
    if next(built) >= MAX_PARTS:
        raise UserError(f"the checkpoint's specification has more than {MAX_PARTS:,} parts; use another checkpoint")
    args = {
        name: _build(value, trust, built) if _is_spec(value) else value for name, value in dict(spec["args"]).items()
    }
    name = spec["name"]
    if name == "TimmEncoder":
        # Never download or open files for a backbone, because anybody may have written the checkpoint.
        args |= {"pretrained": False, "weights": None}
    return _find_class(name, trust)(**args)


def _is_spec(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"name", "args"}


def _find_class(name: Any, trust: Sequence[str]) -> type[nn.Module]:
    module_name, _, class_name = str(name).rpartition(".")
    ours = [module for module in modules().get(str(name), []) if module.split(".")[1] in MODELS]
    if len(ours) == 1:
        module = importlib.import_module(ours[0])
    elif any(f"{module_name}.".startswith(f"{package}.") for package in trust if package):
        try:
            module = importlib.import_module(module_name)
        except ImportError as fault:
            raise UserError(
                f"--trust {name.partition('.')[0]}: {fault}; install the package that the checkpoint needs"
            ) from fault
    else:
        raise UserError(
            f"the checkpoint names {name!r}, which is not a model class of vlm; "
            f"{suggest_trust(str(name).partition('.')[0])}"
        )
    kind = getattr(module, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__):
        raise UserError(f"the checkpoint names {name!r}, which is not a module class; use another checkpoint")
    return kind


class SizeLimit(TorchFunctionMode):
    """Stops a specification from allocating more memory, or building more parts, than the stored weights need."""

    FACTORIES = (
        torch.empty,
        torch.zeros,
        torch.ones,
        torch.rand,
        torch.randn,
        torch.full,
        torch.arange,
        torch.linspace,
    )

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        # Counted by storage, because expanded or shared tensors claim more than the file contains.
        storages = [(tensor.untyped_storage(), tensor.element_size()) for tensor in state.values() if tensor.is_cpu]
        stored = sum({storage.data_ptr(): storage.nbytes() // size for storage, size in storages}.values())
        # A factor of two and a constant leave room for buffers and temporaries.
        self.elements = 2 * stored + 1_000_000
        self.tensors = 2 * len(state) + 100

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.FACTORIES:
            sizes = [a for a in args if isinstance(a, int | tuple | list)]
            count = 1
            for size in sizes:
                for side in (size,) if isinstance(size, int) else size:
                    count *= max(1, abs(int(side)))
            self.elements -= count
            self.tensors -= 1
            if min(self.elements, self.tensors) < 0:
                raise ValueError("the specification asks for more than the stored weights")
        return func(*args, **(kwargs or {}))


def rebuild_shapes(spec: Mapping[str, Any]) -> nn.Module:
    """Builds a module as `rebuild` does, on the device "meta": parameters have names and shapes, but no values.

    Raises:
        UserError: As `rebuild`.
    """
    # Random numbers on "meta" would import torch's compiler: two seconds and 0.15 GB.
    with torch.device("meta"), NoDraws():
        return rebuild(spec)


class NoDraws(TorchFunctionMode):
    """Skips the random initialisation of weights that are loaded anyway: seconds for large models."""

    DRAWS = (
        torch.Tensor.normal_,
        torch.Tensor.uniform_,
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.kaiming_normal_,
        nn.init.kaiming_uniform_,
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.DRAWS:
            return func(*args, **(kwargs or {}))
        return args[0] if args else (kwargs or {})["tensor"]
