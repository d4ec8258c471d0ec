"""The first training batch, printed before the first step."""

from typing import Any, cast

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from vlm.errors import Count
from vlm.training.task import Task


class ShowFirstBatch(L.Callback):
    """Prints, before the first step: the parameter counts, and inputs and targets of one sample.

    A wrong shift of the labels, a missing end token or wrong classes are visible in it.

    Args:
        tokens: How many tokens of a text are shown.
    """

    def __init__(self, *, tokens: Count = 16) -> None:
        self.tokens = tokens

    @rank_zero_only
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 0 and batch_idx == 0 and len(batch.ids):
            task = cast(Task, pl_module)
            lines = [*parameters(task.model), *task.reading(batch, self.tokens)]
            print("\n".join(lines), flush=True)


def parameters(model: nn.Module) -> list[str]:
    """Lines that count the parameters of a model and of its parts."""
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    return [f"parameters  {total:,} ({parts}); {trained:,} are trained"]
