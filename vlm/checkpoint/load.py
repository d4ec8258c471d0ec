"""Checkpoints: written whole or not at all, verified when read, rebuilt from names and plain arguments only.

A file is Lightning's, with `format` and one more entry, `vlm`, that holds all that using the model needs: its
specification, tokenizer, preprocessing, resolved config and scores. Reading one executes nothing that it holds.
"""

import glob
import importlib
import os
import pkgutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vlm.checkpoint.verify import check_archive, check_content
from vlm.errors import UserError

FORMAT = 1
ROOMS = ("models", "nn")  # the packages of vlm whose classes a checkpoint may name
MAX_PARTS = 1000  # of a specification: one may refer to the same part again and again


def write(path: str | os.PathLike, checkpoint: Mapping[str, Any], *, keep: Path | None = None) -> None:
    """Writes a checkpoint beside its place, syncs it, and renames it into its place: a kill leaves the old one whole.

    Args:
        keep: Where what stood at the path goes; by default it is gone.
    Raises:
        UserError: The disk is full or the folder cannot be written; what stood there before is untouched.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path.parent, path.name)
        handle, beside = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(dict(checkpoint), file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(beside, 0o644)
            if keep is not None:
                os.replace(path, keep)
            os.replace(beside, path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as fault:  # torch's writer reports a full disk as a RuntimeError
        reason = _reason(fault)
        raise UserError(
            f"{path}: cannot write the checkpoint ({reason}); free space or choose another folder", 1
        ) from fault


def _reason(fault: BaseException) -> str:
    """What the system said, which torch's writer may hide behind a complaint of its own."""
    first: BaseException | None = fault
    while first is not None and not isinstance(first, OSError):
        first = first.__context__
    return (first.strerror if isinstance(first, OSError) else None) or str(fault).splitlines()[0]


def remove_unfinished(folder: Path, name: str = "*") -> None:
    """Removes what processes left in a folder that were killed while they wrote a checkpoint of this name, or any."""
    for left in folder.glob(f".{name if name == '*' else glob.escape(name)}.*.tmp"):
        left.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: str | os.PathLike) -> dict[str, Any]:
    """Reads a checkpoint of ours to the CPU after checking that every byte is as it was written; executes nothing.

    Raises:
        UserError: There is none, it is no checkpoint of vlm, or it is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(
            f"{path}: no such checkpoint; give the path of a .ckpt file, as under runs/NAME/TIME/checkpoints/"
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
    if not isinstance(checkpoint, dict) or "format" not in checkpoint or "vlm" not in checkpoint:
        raise UserError(f"{path}: was not written by vlm; give a .ckpt file of `vlm train`")
    if checkpoint["format"] != FORMAT:
        raise UserError(
            f"{path}: has format {checkpoint['format']}, this vlm reads {FORMAT}; install the vlm that wrote it"
        )
    return checkpoint


def weights(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights that evaluation uses (the moving average where there is one), under the model's own names."""
    stored = {**checkpoint["state_dict"], **checkpoint.get("ema", {})}  # counters, say of a batch norm, have no average
    return {name.removeprefix("model."): tensor for name, tensor in stored.items() if name.startswith("model.")}


def load_model(checkpoint: Mapping[str, Any], *, trust: str | None = None) -> nn.Module:
    """Rebuilds the model of a checkpoint with its weights, in evaluation mode.

    Args:
        trust: A package of the user's own whose classes may be built too.
    Raises:
        UserError: The checkpoint names what may not be built, or its weights do not fit its specification.
    """
    try:
        state = weights(checkpoint)
        with _SizeLimit(state), torch.no_grad():
            model = rebuild(checkpoint["vlm"]["model"], trust=trust)
        model.load_state_dict(state)
    except UserError:
        raise
    except Exception as fault:  # a specification may hold anything, and break a constructor in any way
        reason = str(fault).strip().splitlines()[0] if str(fault) else type(fault).__name__
        raise UserError(
            f"the checkpoint's weights and specification do not fit ({reason}); use another checkpoint"
        ) from fault
    return model.eval()


def rebuild(spec: Mapping[str, Any], *, trust: str | None = None) -> nn.Module:
    """Builds a module from {"name": "models.vit.ViT", "args": {...}}; arguments may hold such nodes themselves.

    Raises:
        UserError: A name is not a module class of vlm.models or vlm.nn, nor of the trusted package.
    """
    return _build(spec, trust, count())


def _build(spec: Mapping[str, Any], trust: str | None, built: Iterator[int]) -> nn.Module:
    if next(built) >= MAX_PARTS:
        raise UserError(f"the checkpoint's specification has more than {MAX_PARTS:,} parts; use another checkpoint")
    args = {
        name: _build(value, trust, built) if _is_spec(value) else value for name, value in dict(spec["args"]).items()
    }
    name = spec["name"]
    if name == "models.timm_encoder.TimmEncoder":
        # What a stranger's file names is built bare: nothing is fetched, no other file is opened.
        args |= {"pretrained": False, "weights": None}
    return _find_class(name, trust)(**args)


def _is_spec(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"name", "args"}


def _find_class(name: str, trust: str | None) -> type[nn.Module]:
    module_name, _, class_name = str(name).rpartition(".")
    ours = [f"{room}.{module.name}" for room in ROOMS for module in pkgutil.iter_modules(_paths(room))]
    if module_name in ours:
        module = importlib.import_module(f"vlm.{module_name}")
    elif trust is not None and (module_name == trust or module_name.startswith(f"{trust}.")):
        try:
            module = importlib.import_module(module_name)
        except ImportError as fault:
            raise UserError(f"--trust {trust}: {fault}; install the package that the checkpoint needs") from fault
    else:
        raise UserError(
            f"the checkpoint names {name!r}, which is no class of vlm; if you trust its author, use --trust PACKAGE"
        )
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module) and found.__module__ == module.__name__):
        raise UserError(f"the checkpoint names {name!r}, which is no module class; use another checkpoint")
    return found


def _paths(room: str) -> list[str]:
    return [str(Path(__file__).parents[1] / room)]


class _SizeLimit(TorchFunctionMode):
    """Stops a specification from allocating more, or building more parts, than the stored weights could fill."""

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
        # Counted by storage: a tensor that is expanded, or shares another's memory, claims more than the file holds.
        storages = [(tensor.untyped_storage(), tensor.element_size()) for tensor in state.values() if tensor.is_cpu]
        stored = sum({storage.data_ptr(): storage.nbytes() // size for storage, size in storages}.values())
        # Twice, and some: there are buffers and temporaries beside the weights themselves.
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
