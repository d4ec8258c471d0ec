"""The checkpoints of a run: when they are written, averaged weights, and early stopping."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import lightning as L
import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor

from vlm.checkpoint import file as save
from vlm.checkpoint import load as ckpt
from vlm.errors import Count, Range, SharedError, did_you_mean, nearest
from vlm.training.step.finite import refuse_non_finite
from vlm.training.step.fsdp import like
from vlm.training.step.lightning_private import as_between_batches, log_step_now, validates
from vlm.training.step.step import accumulates
from vlm.training.step.task import Task

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
RESUMING = ("optimizer_states", "lr_schedulers", "loops", "callbacks", "ema")  # entries that only training reads


class VerifiedIO(CheckpointIO):
    """Uses vlm.checkpoint for all of Lightning's saves and loads: atomic writes, verified and safe reads.

    A save keeps the `last.ckpt` that it replaces as `previous.ckpt`, if this process wrote or verified it, so that a
    damaged file never replaces a good one. `best.ckpt` holds the weights that evaluation uses, and no optimiser.
    """

    def __init__(self) -> None:
        self._whole: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any = None) -> None:
        place = Path(path).resolve()
        keep = place.with_name(PREVIOUS) if place.name == LAST and place in self._whole else None
        save.write(path, evaluated(checkpoint) if place.name == BEST else checkpoint, keep=keep)
        self._whole.add(place)

    def load_checkpoint(
        self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = ckpt.read(path, merge=False)
        self._whole.add(Path(path).resolve())
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        Path(path).unlink(missing_ok=True)


class Checkpoints(L.Callback):
    """Keeps `last.ckpt` to resume from, the one before it as `previous.ckpt`, and the best validated as `best.ckpt`.

    The last step of `trainer.max_steps` is validated too.

    Args:
        monitor: Metric that selects the best; None to keep the latest, when no score may select.
        mode: "max" or "min".
        every_n_steps: Optimiser steps between saves of `last`, besides the one after each validation.
    """

    def __init__(self, *, monitor: str | None, mode: Literal["min", "max"], every_n_steps: Count) -> None:
        self.monitor, self.mode, self.every_n_steps = monitor, mode, every_n_steps
        self.best_score: float | None = None
        self.folder: Path | None = None
        self._saved_step, self._validation_due = -1, False

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if same_metric(self, state_dict):
            self.best_score = state_dict["best_score"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.folder = Path(trainer.default_root_dir) / "checkpoints"

    @property
    def last(self) -> Path:
        """Path of `last.ckpt`."""
        assert self.folder is not None, "no run has been set up"
        return self.folder / LAST

    @property
    def best(self) -> Path:
        """Path of `best.ckpt`."""
        return self.last.with_name(BEST)

    @property
    def best_or_last(self) -> Path:
        """The checkpoint to evaluate and use: the best, or the last of a run that had no validation."""
        return self.best if self.best.is_file() else self.last

    def save_last(self, trainer: L.Trainer, *, validation_due: bool = False) -> None:
        """Saves `last.ckpt` unless this step is already saved.

        Args:
            validation_due: Whether a run that is resumed from it starts with a validation.
        """
        if trainer.global_step == self._saved_step and not validation_due:
            return
        self._validation_due = validation_due
        trainer.save_checkpoint(self.last)
        self._validation_due = False
        self._saved_step = trainer.global_step

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        cast(Task, pl_module).step.read_check()
        refuse_non_finite(trainer, checkpoint)
        as_between_batches(
            checkpoint["loops"]["fit_loop"],
            epoch_batches=int(trainer.num_training_batches),
            step=trainer.global_step,
            validation_due=self._validation_due,
        )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if out_of_steps(trainer):
            trainer.should_stop = True  # the trainer validates when asked to stop, but not when it reaches max_steps
        step = trainer.global_step
        due = step != self._saved_step and step % self.every_n_steps == 0 and not accumulates(trainer)
        if due and not validates(trainer):  # a validation saves after itself
            log_step_now(trainer)
            self.save_last(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        scores = trainer.callback_metrics
        score = float(scores[self.monitor]) if self.monitor in scores else None
        if self.monitor is None or (score is not None and self._is_better(score)):
            self.best_score = score
            trainer.save_checkpoint(self.best)
        if not accumulates(trainer):  # a save in the middle of an optimiser step would lose its gradients
            self._saved_step = -1  # the best score is part of `last`
            self.save_last(trainer)
        if self.monitor is not None and score is None:
            raise not_logged("callbacks.checkpoints.monitor", self.monitor, scores)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.save_last(trainer)

    def _is_better(self, score: float) -> bool:
        if math.isnan(score):
            return False
        if self.best_score is None:
            return True
        # On a tie the later one wins: it has trained longer.
        return score >= self.best_score if self.mode == "max" else score <= self.best_score


def same_metric(callback: Any, state: Mapping[str, Any]) -> bool:
    """Returns True if a callback's stored state belongs to its metric, which a resumed run may change."""
    return all(state.get(name, getattr(callback, name)) == getattr(callback, name) for name in ("monitor", "mode"))


def not_logged(key: str, metric: str, scores: Mapping[str, Any]) -> SharedError:
    """The error for a config key that names a metric which is never logged.

    Its attribute `overrides` is what the command that resumes the run must correct.
    """
    logged = sorted(name for name in scores if name.startswith("val/"))
    near = nearest(metric, logged)
    fault = SharedError(f"{key}: no {metric} is logged; choose one of {', '.join(logged)}{did_you_mean(near)}")
    fault.overrides = [f"{key}={near or 'val/loss'}"]  # type: ignore[attr-defined]
    return fault


def evaluated(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint for inference: averaged weights if there are any, and no training state."""
    kept = {name: value for name, value in checkpoint.items() if name not in RESUMING}
    return {**kept, "state_dict": {**checkpoint["state_dict"], **checkpoint.get("ema", {})}}


def out_of_steps(trainer: L.Trainer) -> bool:
    """Returns True once `trainer.max_steps` is reached; a resumed trainer would not run a pending validation."""
    return 0 <= trainer.max_steps <= trainer.global_step


class EarlyStopping(L.Callback):
    """Ends a run after some validations in a row without a gain (Prechelt 1998, "Early Stopping - But When?").

    The best checkpoint is tested as usual. If the run is resumed, it only tests again.

    Args:
        monitor: Metric that says which validation is better.
        mode: "max" or "min".
        patience: Validations without a gain after which the run ends.
        min_gain: An improvement counts as a gain if it is larger than this.
    """

    def __init__(
        self, *, monitor: str, mode: Literal["min", "max"], patience: Count, min_gain: Annotated[float, Range(0)]
    ) -> None:
        self.monitor, self.mode, self.patience, self.min_gain = monitor, mode, patience, min_gain
        self.best = math.inf
        self.waited = 0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if same_metric(self, state_dict):
            self.best, self.waited = state_dict["best"], state_dict["waited"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.waited >= self.patience

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        scores = trainer.callback_metrics
        if self.monitor not in scores:
            raise not_logged("callbacks.early_stopping.monitor", self.monitor, scores)
        score = float(scores[self.monitor]) * (-1 if self.mode == "max" else 1)
        gained = score < self.best - self.min_gain  # False for NaN
        self.best, self.waited = (score, 0) if gained else (self.best, self.waited + 1)
        if self.waited < self.patience:
            return
        trainer.should_stop = True
        if trainer.is_global_zero:
            print(f"\nstopped early: {self.monitor} did not improve in {self.waited} validations", flush=True)


class EMA(L.Callback):
    """Keeps an exponential moving average of the weights and evaluates with it (Polyak and Juditsky 1992).

    Args:
        decay: Share of the average that is kept at each step; less in early steps, (1 + step) / (10 + step).
    """

    def __init__(self, *, decay: Annotated[float, Range(above=0, below=1)]) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self._raw: dict[str, Tensor] = {}
        self._step = -1

    def _tensors(self, pl_module: L.LightningModule) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in pl_module.state_dict().items() if tensor.is_floating_point()}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        tensors = self._tensors(pl_module)
        loaded = self.average
        self.average = {
            name: like(loaded.get(name, tensor), tensor).clone().to(tensor.device) for name, tensor in tensors.items()
        }
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        decay = min(self.decay, (1 + self._step) / (10 + self._step))
        tensors = self._tensors(pl_module)
        torch._foreach_lerp_([self.average[name] for name in tensors], list(tensors.values()), 1 - decay)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.average and not self._raw:
            self._raw = {name: tensor.clone() for name, tensor in self._tensors(pl_module).items()}
            self._set(pl_module, self.average)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._raw:
            self._set(pl_module, self._raw)
            self._raw = {}

    def _set(self, pl_module: L.LightningModule, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors(pl_module).items():
                tensor.copy_(values[name])

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.average:
            checkpoint["ema"] = self.average
        if self._raw:  # saved during a validation; training continues from the raw weights
            checkpoint["state_dict"] = {**checkpoint["state_dict"], **self._raw}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.average = dict(checkpoint.get("ema", {}))
