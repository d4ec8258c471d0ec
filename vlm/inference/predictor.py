"""Trained models, ready to use: the base of all tasks' predictors."""

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.verify import refusing
from vlm.data.images.image import Preprocess
from vlm.errors import Count, UserError
from vlm.inference.tasks import TASKS, commands_of, resolve
from vlm.io.output import RecordList, Records
from vlm.models.pretrained.folder import is_folder
from vlm.nn.precision import has_bfloat16
from vlm.nn.step.packed import prepack


class Predictor(ABC):
    """A trained model of one task with all that stands between it and its user.

    Attributes:
        task: The task's name in checkpoints: short for one of vlm, package.module.Class for one of a user's own.
        fields: The fields of a record that a line of text shows.
    Args:
        path: The checkpoint.
        device: The device that it runs on.
        dtype: Of weights and states.
        trust: A package of the user's own whose classes may be built.
        loaded: What the checkpoint holds, where it has been read before.
    Raises:
        UserError: The checkpoint is damaged, or of another task.
    """

    task: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        path: str,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        trust: str | None = None,
        loaded: Mapping[str, Any] | None = None,
    ) -> None:
        loaded = ckpt.read(path, dtype=dtype) if loaded is None else loaded
        self.device, self.dtype = device, dtype
        with refusing(path):
            about = loaded["vlm"]
            held = str(about["task"])
            if held != self.task:
                other = commands_of(held)[0]
                raise UserError(f"{path}: holds a model for {held}, not for {self.task}; use `vlm {other}`")
            self.restore(about)
            self.model: Any = ckpt.load_model(loaded, trust=trust, dtype=dtype).to(device)
            if not is_folder(ckpt.locate(path)):  # whose config was compared with every shape as it was read
                with torch.inference_mode():
                    self.check()

    @abstractmethod
    def restore(self, about: Mapping[str, Any]) -> None:
        """Takes what a checkpoint holds beside the model, as the task's `description` wrote it."""

    def check(self) -> None:
        """Refuses a model whose outputs do not fit the rest of the checkpoint.

        Raises:
            UserError: It does not.
        """
        return None

    @staticmethod
    def inputs(arguments: Sequence[str]) -> list[str]:
        """The inputs that the arguments of `vlm predict` name."""
        return list(arguments)

    @abstractmethod
    def predict(self, inputs: Sequence[str], records: Records, *, batch_size: int) -> int:
        """Writes a record for each input, as its own command does by default; returns the exit status."""

    @classmethod
    def several(cls, inputs: Any) -> tuple[list[Any], bool]:
        """The inputs that an argument of `use` stands for, and whether it is one alone."""
        alone = isinstance(inputs, str | os.PathLike) or not isinstance(inputs, Iterable)
        return ([inputs], True) if alone else (list(inputs), False)

    def use(self, inputs: Sequence[Any], *, batch_size: Count = 32) -> list[Any]:
        """The records that `vlm predict` writes.

        Args:
            inputs: Inputs as on the command line.
            batch_size: Inputs at a time.
        """
        records = RecordList()
        self.predict(self.inputs(inputs), records, batch_size=batch_size)
        return records.rows

    def prepack(self, rows: int, *, more: bool = True) -> None:
        """Lays the weights out for use on a CPU; values stay, but the model can be trained no more.

        Args:
            rows: Inputs, or texts, that are mostly computed at once.
            more: Whether others follow: of one row alone, the layout would take longer than it saves.
        """
        if more or rows > 1:
            prepack(self.model)

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        """Lines of `vlm info` about what a checkpoint holds beside the model."""
        yield from ()


def task_of(path: str) -> str:
    """The task of a checkpoint's model.

    Raises:
        UserError: The checkpoint is damaged.
    """
    return _task(path, ckpt.read(path))


def _task(path: str, loaded: Mapping[str, Any]) -> str:
    with refusing(path):
        return str(loaded["vlm"]["task"])


def load_predictor(
    path: str, *, trust: str | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> Predictor:
    """The predictor of a checkpoint of any task, which is read once.

    Raises:
        UserError: As `Predictor` and `predictor_of`.
    """
    loaded = ckpt.read(path, dtype=dtype)
    kind = predictor_of(path, trust=trust, task=_task(path, loaded))
    return kind(path, trust=trust, dtype=dtype, loaded=loaded, **options)


def predictor_of(path: str, *, trust: str | None = None, task: str | None = None) -> type[Predictor]:
    """The class that uses a checkpoint's model: the one that TASKS names, or of the user's own package.

    A class of one's own is the predictor itself, or a task that names it as its `predictor`.

    Args:
        task: The task, where it has been read before.
    Raises:
        UserError: The checkpoint is damaged, its task has no such class, or the package is not trusted.
    """
    task = task_of(path) if task is None else task
    if task in TASKS:
        return resolve(TASKS[task].predictor)
    module, _, name = task.rpartition(".")
    if trust is None or not f"{module}.".startswith(f"{trust}."):
        raise UserError(f"{path}: its task {task!r} is none of vlm; if you trust its author, use --trust PACKAGE")
    try:
        kind = getattr(importlib.import_module(module), name, None)
    except ImportError as fault:
        raise UserError(f"--trust {trust}: {fault}; install the package that the checkpoint needs") from fault
    kind = getattr(kind, "predictor", kind)
    if not (isinstance(kind, type) and issubclass(kind, Predictor)):
        raise UserError(f"{path}: its task {task} is no Predictor and names none as its `predictor`")
    return kind


def normalized(model: nn.Module, preprocess: Preprocess, pixels: Tensor) -> Tensor:
    """Images as a model's first layer takes them: uint8 (B, 3, H, W) -> the same, of the type of its weights."""
    return preprocess.normalize(pixels).to(next(model.parameters()).dtype)


def check_outputs(logits: Tensor, count: int, unit: str) -> None:
    """Refuses a model with another number of outputs than the checkpoint names.

    Raises:
        UserError: The two counts differ.
    """
    if logits.shape[-1] != count:
        raise UserError(f"the checkpoint has {count} {unit}, its model {logits.shape[-1]}; use another checkpoint")


def choose_device(name: str) -> str:
    """The device of --device.

    Raises:
        UserError: It is unknown, or this machine has none.
    """
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device, there in here.items() if there)
    if name not in here:
        raise UserError(f"--device: {name!r} is unknown; choose auto, cpu, cuda or mps")
    if not here[name]:
        raise UserError(f"--device {name}: this machine has no {name.upper()} device that torch can use; choose cpu")
    return name


def choose_precision(name: str, device: str) -> torch.dtype:
    """The type of numbers of --precision; auto takes bfloat16 where the device is faster in it.

    Raises:
        UserError: It is unknown.
    """
    if name not in ("auto", "fp32", "bf16"):
        raise UserError(f"--precision: {name!r} is unknown; choose auto, fp32 or bf16")
    low = name == "bf16" or (name == "auto" and has_bfloat16(device))
    return torch.bfloat16 if low else torch.float32
