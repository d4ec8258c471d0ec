"""Which checkpoints a run keeps, and when they are written."""

import math
import os
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.plugins.io import CheckpointIO

from vlm import checkpoint as ckpt


class VerifiedIO(CheckpointIO):
    """Leads every save and load of Lightning through vlm.checkpoint: atomic writes, verified and safe reads."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any = None) -> None:
        ckpt.write(path, checkpoint)

    def load_checkpoint(
        self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return ckpt.read(path)

    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        Path(path).unlink(missing_ok=True)


class Checkpoints(L.Callback):
    """Keeps `last.ckpt`, where training goes on, and `best.ckpt`, the best validated one.

    Args:
        monitor: Metric that says which is best; None for the latest, where nothing may be chosen by a score.
        mode: "max" or "min".
        every_n_steps: Optimiser steps between saves of `last`, besides the one after each validation.
    """

    def __init__(self, *, monitor: str | None, mode: Literal["min", "max"], every_n_steps: int) -> None:
        self.monitor, self.mode, self.every_n_steps = monitor, mode, every_n_steps
        self.best_score: float | None = None
        self.folder: Path | None = None
        self._saved_step = -1

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score = state_dict["best_score"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.folder = Path(trainer.default_root_dir) / "checkpoints"

    @property
    def last(self) -> Path:
        """Where `last.ckpt` is kept."""
        assert self.folder is not None, "no run has been set up"
        return self.folder / "last.ckpt"

    @property
    def best(self) -> Path:
        """Where `best.ckpt` is kept."""
        return self.last.with_name("best.ckpt")

    def save_last(self, trainer: L.Trainer) -> None:
        """Saves `last.ckpt` unless this step already is."""
        if trainer.global_step != self._saved_step:
            trainer.save_checkpoint(self.last)
            self._saved_step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step != self._saved_step and step % self.every_n_steps == 0 and not accumulating(trainer):
            self.save_last(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        score = None if self.monitor is None else trainer.callback_metrics.get(self.monitor)
        if self.monitor is None or (score is not None and self._is_better(float(score))):
            self.best_score = None if score is None else float(score)
            trainer.save_checkpoint(self.best)
        self._saved_step = -1  # the best score is part of `last`
        self.save_last(trainer)

    def _is_better(self, score: float) -> bool:
        if math.isnan(score):
            return False
        if self.best_score is None:
            return True
        # Of equals the later one is kept: it has seen more.
        return score >= self.best_score if self.mode == "max" else score <= self.best_score


def accumulating(trainer: L.Trainer) -> bool:
    """Whether the last batch ended in the middle of an optimiser step."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    done = batches.current.ready
    return done % trainer.accumulate_grad_batches != 0 and not batches.is_last_batch
