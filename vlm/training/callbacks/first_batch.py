"""The first training batch, printed before the first step."""

from collections.abc import Iterator
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from vlm.data.fields import CaptionField
from vlm.data.text.conversation_field import ConversationField
from vlm.errors import Count, printable
from vlm.io.terminal import folded
from vlm.training.data_module import Data
from vlm.training.step.task import Task


class ShowFirstBatch(L.Callback):
    """Prints a header and, before the first step, the parameter counts and the inputs and targets of one sample.

    They reveal a wrong shift of the labels, a missing end token or wrong classes.

    Args:
        tokens: Number of tokens shown of a text.
    """

    def __init__(self, *, tokens: Count = 16) -> None:
        self.tokens = tokens

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.print(folded("\n".join(map(printable, header(trainer)))))  # above the progress bar

    @rank_zero_only
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 0 and batch_idx == 0 and len(batch.ids):
            task = cast(Task, pl_module)
            lines = [*parameters(task.model), *truncated(task), *task.reading(batch, self.tokens)]
            pl_module.print(folded("\n".join(map(printable, lines))))


def header(trainer: L.Trainer) -> list[str]:
    """Lines on device, precision, sizes of the data and folder of a run."""
    device, data = trainer.strategy.root_device, cast(Data, trainer.datamodule)  # type: ignore[attr-defined]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    count = f"{trainer.world_size} x {name}" if trainer.world_size > 1 else name
    sizes = ", ".join(f"{split} {len(samples):,}" for split, samples in data.splits.items())
    return [
        f"run         {trainer.default_root_dir}",
        f"device      {count}, {trainer.precision}",
        f"data        {sizes}",
    ]


def parameters(model: nn.Module) -> list[str]:
    """Lines that count the parameters of a model and of its parts."""
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    return [f"parameters  {total:,} ({parts}); {'all' if trained == total else f'{trained:,}'} are trained"]


def truncated(task: Task) -> Iterator[str]:
    """A line if captions or conversations are longer than the model reads."""
    for field in task.fields.values():
        if isinstance(field, CaptionField) and field.truncated:
            what = "conversations" if isinstance(field, ConversationField) else "different captions"
            said = f"{field.truncated:,} {what} are longer than data.max_len={field.max_len} tokens"
            yield f"truncated   {said}; raise it to train on all of their words"
