"""The progress of a run, in one line."""

import io
import sys
import time
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from vlm.training.step.optim import total_steps
from vlm.training.step.task import Task

PERIOD, PERIOD_OF_FILES = 0.5, 60.0  # seconds between two drawings in a terminal, and between two lines in a file
SPAN = 2.0  # seconds that a rate is measured over
BAR, LEFT = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}", ", {remaining} left"  # they fit 80 columns


class Progress(ProgressBar):
    """Shows optimiser steps, the time left of the whole run, loss, samples (or tokens) a second and learning rate.

    In a terminal it is a bar, drawn twice a second; in a file, one line per minute. Validations and the test show how
    many of their batches are done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.terminal, self.is_enabled = sys.stderr.isatty(), True
        self.bar: tqdm | None = None
        self._shown = self._since = self._rate = 0.0
        self._done = 0

    def disable(self) -> None:
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        if self.is_enabled:
            tqdm.write(sep.join(map(str, args)), file=sys.stdout, **kwargs)  # above the bar

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        total, wanted = total_steps(trainer), trainer.max_steps
        if total is not None and total < wanted:
            self.print(
                f"note: trainer.max_epochs={trainer.max_epochs} ends the training after {total:,} steps, before "
                f"trainer.max_steps={wanted:,}; set more epochs to reach it"
            )
        self._begin(total, at=trainer.global_step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        task = cast(Task, pl_module)
        self._done += task.size(batch) * trainer.world_size
        spent = time.monotonic() - self._since
        if spent > SPAN or not self._rate:
            self._rate = self._done / spent
        if spent > SPAN:
            self._restart()
        if self._is_due():
            texts = [f"{name} {float(value):.3g}" for name, value in trainer.progress_bar_metrics.items()]
            texts += [] if task.step.loss is None else [f"loss {task.step.loss:.3f}"]
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self._show(trainer.global_step, *texts, f"{self._rate:.0f} {task.unit}/s", f"lr {rate:.1e}")

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        if self._is_due():
            self._show(trainer.global_step, f"validation {batch_idx + 1}/{int(sum(trainer.num_val_batches))}")

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show(trainer.global_step, "validation: scores")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.bar is not None:
            self.bar.clear()  # other callbacks print now
        self._restart()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin(int(sum(trainer.num_test_batches)), title="test ")

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        if self._is_due():
            self._show(batch_idx + 1)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._show(int(sum(trainer.num_test_batches)), "scores")

    on_test_end = on_train_end

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._end()

    def _begin(self, total: int | None, *, at: int = 0, title: str = "") -> None:
        self._restart()
        if self.is_enabled:
            file = sys.stderr if self.terminal else io.StringIO()
            options: Any = {"dynamic_ncols": True, "leave": False, "position": 0, "smoothing": 0}
            self.bar = tqdm(desc=title, total=total, initial=at, file=file, delay=1, **options)  # not drawn yet
            self.bar.delay = 0

    def _end(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _restart(self) -> None:
        """Measures the rate from now on."""
        self._done, self._since = 0, time.monotonic()

    def _is_due(self) -> bool:
        period = PERIOD if self.terminal else PERIOD_OF_FILES
        return self.bar is not None and time.monotonic() - self._shown > period

    def _show(self, done: int, *texts: str) -> None:
        if (bar := self.bar) is None:
            return
        self._shown, bar.n = time.monotonic(), done
        place = BAR + LEFT * (done > bar.initial) if bar.total else "{desc}{n_fmt} steps, {elapsed}"
        bar.bar_format = place + "{postfix}"
        bar.set_postfix_str(", ".join(texts), refresh=self.terminal)
        if not self.terminal:
            print(bar, file=sys.stderr, flush=True)
