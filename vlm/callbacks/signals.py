"""Stopping on a signal with nothing lost."""

import os
import signal
from types import FrameType
from typing import Any

import lightning as L

from vlm.callbacks.checkpoints import Checkpoints, accumulating


class Stopped(Exception):
    """Training stopped because of a signal, after saving.

    Args:
        signum: The signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.status = 128 + signum


class StopOnSignal(L.Callback):
    """On SIGINT or SIGTERM finishes the optimiser step, saves `last.ckpt` and ends the run; a second signal kills it.

    The handler only sets a flag, since a signal may come in the middle of anything; ranks agree on it after a batch.
    """

    def __init__(self) -> None:
        self.received = 0
        self._leaving = False
        self._before: dict[int, Any] = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + signum)
        self.received = signum

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._handle)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if accumulating(trainer) or not trainer.strategy.reduce_boolean_decision(bool(self.received), all=False):
            return
        next(c for c in trainer.callbacks if isinstance(c, Checkpoints)).save_last(trainer)  # type: ignore[attr-defined]
        loop = trainer.fit_loop
        if loop.epoch_loop._should_check_val_fx(loop._data_fetcher):  # type: ignore[arg-type]
            self._leaving = True  # the validation that is due belongs to this step: it comes first
            return
        # The trainer writes a step's metrics after this hook, which will not return.
        trainer._logger_connector.on_batch_end()
        trainer._logger_connector.update_train_step_metrics()
        raise Stopped(self.received or signal.SIGTERM)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if self._leaving:
            raise Stopped(self.received or signal.SIGTERM)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._leaving:
            raise Stopped(self.received or signal.SIGTERM)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()
