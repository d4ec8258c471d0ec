"""Messages about torch.compile."""

from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from vlm.training.step import compiling


class CompileMessages(L.Callback):
    """Prints that the first steps compile, and how long compilation took."""

    def __init__(self) -> None:
        self._before: float | None = None

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before = compiling.seconds()
        pl_module.print("compile     the first steps compile the model's blocks, half a minute or more")

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._before is None:
            return
        spent = compiling.seconds()
        if spent == self._before:
            pl_module.print(f"compiled    in {spent:.0f} s; other sizes of batches may add to it")
            self._before = None
        else:
            self._before = spent
