"""Memory that a training has freed, and the C library keeps."""

from typing import Any

import lightning as L

from vlm.machine import held_memory
from vlm.tuning import return_freed_memory

EVERY = 50  # steps between looks
GROWTH = 1.25  # of the memory that the process holds


class ReturnFreedMemory(L.Callback):
    """Returns freed memory when a process that trains on the CPU has grown.

    The C library keeps it for the next tensors (vlm.tuning.keep_freed_memory). Batches of many lengths leave holes that
    few other tensors fit, so that the process grows for thousands of steps.
    """

    def __init__(self) -> None:
        self._least: int | None = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % EVERY or pl_module.device.type != "cpu":
            return
        held = held_memory()
        self._least = min(held, self._least or held)
        if held > GROWTH * self._least:
            return_freed_memory()
