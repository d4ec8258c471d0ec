"""The progress bar."""

import time
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar

from vlm.training.step.task import Task


class Progress(TQDMProgressBar):
    """A bar with the loss, the learning rate and the images, or tokens, a second of training."""

    BAR_FORMAT = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"  # 80 columns

    def __init__(self) -> None:
        super().__init__(refresh_rate=10)
        self._done, self._since, self._rate = 0, 0.0, 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        self._done, self._since = 0, time.monotonic()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._done += cast(Task, pl_module).size(batch) * trainer.world_size
        now = time.monotonic()
        spent = now - self._since
        if spent > 2 or not self._rate or trainer.is_last_batch:  # an epoch may be shorter
            self._rate = self._done / spent
        if spent > 2:
            self._done, self._since = 0, now
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        for bar in (self._val_progress_bar, self._train_progress_bar):
            if bar is not None:  # else it is drawn once more, below the last words
                bar.leave = False  # nor as it closes: the ^C that the terminal shows has moved to the next line
                bar.close()

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        shown = super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)
        named = {name.removeprefix("train/"): value for name, value in shown.items()}
        loss = cast(Task, pl_module).step_loss  # logged for the bar, it would be read from the device in every step
        named |= {} if loss is None else {"loss": f"{float(loss):.3f}"}
        rate = trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else 0.0
        unit = cast(Task, pl_module).unit
        return {**named, "lr": f"{rate:.1e}", f"{unit}/s": f"{self._rate:.0f}"}
