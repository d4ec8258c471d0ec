"""Rebuilds models from the names and plain arguments of untrusted checkpoints, within bounds."""

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vlm.config.target import MODEL_PACKAGES, modules_by_class, suggest_trust
from vlm.errors import UserError
from vlm.models.pretrained.stack import Spec


@contextmanager
def convert_errors(path: str | os.PathLike) -> Iterator[None]:
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
        raise UserError(f"{path}: is not a valid checkpoint of vlm ({cause}); use another checkpoint") from fault


MAX_PARTS = 1000  # of a specification, which may refer to the same part repeatedly


def rebuild(spec: Spec, *, trust: str | Sequence[str] | None = None) -> nn.Module:
    """Builds a module from {"name": "ViT", "args": {...}}; arguments may be such nodes too.

    Args:
        trust: Packages of the user whose classes are allowed too.
    Raises:
        UserError: A name is not a module class of vlm.models, vlm.nn or a trusted package.
    """
    return _build(spec, (trust,) if isinstance(trust, str) else tuple(trust or ()), count())


def _build(spec: Spec, trust: Sequence[str], built: Iterator[int]) -> nn.Module:
    if next(built) >= MAX_PARTS:
        raise UserError(f"the checkpoint's specification has more than {MAX_PARTS:,} parts; use another checkpoint")
    args = dict(spec["args"])
    for name, value in args.items():
        if isinstance(value, Mapping) and value.keys() == {"name", "args"}:
            args[name] = _build(cast(Spec, value), trust, built)
    if spec["name"] == "TimmEncoder":
        # Never download or open files for a backbone, because anybody may have written the checkpoint.
        args |= {"pretrained": False, "weights": None}
    return _find_class(spec["name"], trust)(**args)


def _find_class(name: Any, trust: Sequence[str]) -> type[nn.Module]:
    module_name, _, class_name = str(name).rpartition(".")
    ours = [module for module in modules_by_class().get(str(name), []) if module.split(".")[1] in MODEL_PACKAGES]
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


def rebuild_shapes(spec: Spec) -> nn.Module:
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
