"""Callbacks for checkpoints, averaged weights and early stopping."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast

import lightning as L
import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor

from vlm.checkpoint import file as save
from vlm.checkpoint import load as ckpt
from vlm.errors import Count, Range, SharedError, did_you_mean, find_similar
from vlm.training.step.fsdp import shard_like
from vlm.training.step.lightning_private import as_between_batches, is_validation_due, log_step_now
from vlm.training.step.losses import refuse_non_finite
from vlm.training.step.step import is_mid_step
from vlm.training.step.task import Task

LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
MetricState: TypeAlias = dict[str, Any]  # state of a callback that watches a metric
# Checkpoint entries that only training reads.
TRAINING_STATE = ("optimizer_states", "lr_schedulers", "loops", "callbacks", "ema")


class VerifiedIO(CheckpointIO):
    """Uses vlm.checkpoint for all of Lightning's saves and loads: atomic writes, verified and safe reads.

    When `last.ckpt` is replaced, the old file becomes `previous.ckpt` if this process wrote or verified it, so that a
    damaged file never replaces an intact one. `best.ckpt` holds the weights for evaluation, without training state.
    """

    def __init__(self) -> None:
        self._verified: set[Path] = set()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any = None) -> None:
        resolved = Path(path).resolve()
        keep = resolved.with_name(PREVIOUS) if resolved.name == LAST and resolved in self._verified else None
        save.write(path, strip_training_state(checkpoint) if resolved.name == BEST else checkpoint, keep=keep)
        self._verified.add(resolved)

    def load_checkpoint(
        self, path: str | os.PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        checkpoint = cast(dict[str, Any], ckpt.read(path, merge=False))
        self._verified.add(Path(path).resolve())
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike) -> None:
        Path(path).unlink(missing_ok=True)


class Checkpoints(L.Callback):
    """Saves `last.ckpt` for resuming, its predecessor as `previous.ckpt`, and the best validated one as `best.ckpt`.

    Args:
        monitor: Metric that selects `best.ckpt`; None to keep the latest.
        mode: "max" or "min".
        every_n_steps: Optimiser steps between saves of `last.ckpt`. It is also saved before and after
            every validation.
    """

    def __init__(self, *, monitor: str | None, mode: Literal["min", "max"], every_n_steps: Count) -> None:
        self.monitor, self.mode, self.every_n_steps = monitor, mode, every_n_steps
        self.best_score: float | None = None
        self.folder: Path | None = None
        self._saved: tuple[int, bool] | None = None  # step and validation_due of the last save
        self._validation_due = False

    def state_dict(self) -> MetricState:
        return {"best_score": self.best_score, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state_dict: MetricState) -> None:
        if same_metric(self, state_dict):
            self.best_score = state_dict["best_score"]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.folder = Path(trainer.default_root_dir) / "checkpoints"

    @property
    def last(self) -> Path:
        """Path of `last.ckpt`."""
        assert self.folder is not None, "setup() has not been called"
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
        """Saves `last.ckpt` unless this state is already saved.

        Args:
            validation_due: Whether a run resumed from it starts with a validation.
        """
        state = trainer.global_step, validation_due
        if state == self._saved:
            return
        self._validation_due = validation_due
        trainer.save_checkpoint(self.last)
        self._validation_due = False
        self._saved = state

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
        if is_mid_step(trainer) or (self._saved and self._saved[0] == trainer.global_step):
            return
        validation_due = is_validation_due(trainer)  # it is saved first: a kill during a long validation costs no step
        if validation_due or trainer.global_step % self.every_n_steps == 0:
            log_step_now(trainer)
            self.save_last(trainer, validation_due=validation_due)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        scores = trainer.callback_metrics
        score = float(scores[self.monitor]) if self.monitor in scores else None
        if score is None or math.isnan(score):
            is_best = self.monitor is None
        elif self.best_score is None:
            is_best = True
        else:  # on a tie, the later checkpoint is kept, because it was trained longer
            is_best = score >= self.best_score if self.mode == "max" else score <= self.best_score
        if is_best:
            self.best_score = score
            trainer.save_checkpoint(self.best)
        if not is_mid_step(trainer):  # a save in the middle of an optimiser step would lose its gradients
            self._saved = None  # the best score is part of `last`
            self.save_last(trainer)
        if self.monitor is not None and score is None:
            raise missing_metric_error("callbacks.checkpoints.monitor", self.monitor, scores)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.save_last(trainer)


def same_metric(callback: "Checkpoints | EarlyStopping", state: MetricState) -> bool:
    """Returns True if a callback's stored state is of its current metric, which a resumed run may change."""
    return all(state.get(name, getattr(callback, name)) == getattr(callback, name) for name in ("monitor", "mode"))


def missing_metric_error(key: str, metric: str, scores: Mapping[str, Tensor]) -> SharedError:
    """Returns the error for a config key that names a metric which is never logged.

    Its attribute `overrides` has the correction for the command that resumes the run.
    """
    logged = sorted(name for name in scores if name.startswith("val/"))
    suggestion = find_similar(metric, logged)
    fault = SharedError(f"{key}: {metric} is not logged; choose one of {', '.join(logged)}{did_you_mean(suggestion)}")
    fault.overrides = [f"{key}={suggestion or 'val/loss'}"]  # type: ignore[attr-defined]
    return fault


def strip_training_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint for inference: without training state, and with averaged weights if there are any."""
    stripped = {name: value for name, value in checkpoint.items() if name not in TRAINING_STATE}
    return {**stripped, "state_dict": {**checkpoint["state_dict"], **checkpoint.get("ema", {})}}


class EarlyStopping(L.Callback):
    """Ends a run after several consecutive validations without improvement (Prechelt 1998).

    The best checkpoint is tested as usual. A resumed run only repeats the test.

    Args:
        monitor: Metric that must improve.
        mode: "max" or "min".
        patience: Number of consecutive validations without improvement after which the run ends.
        min_gain: Smaller changes of the metric do not count as improvement.
    """

    def __init__(
        self, *, monitor: str, mode: Literal["min", "max"], patience: Count, min_gain: Annotated[float, Range(0)]
    ) -> None:
        self.monitor, self.mode, self.patience, self.min_gain = monitor, mode, patience, min_gain
        self.best = math.inf
        self.waited = 0

    def state_dict(self) -> MetricState:
        return {"best": self.best, "waited": self.waited, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state_dict: MetricState) -> None:
        if same_metric(self, state_dict):
            self.best, self.waited = state_dict["best"], state_dict["waited"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.waited >= self.patience

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        scores = trainer.callback_metrics
        if self.monitor not in scores:
            raise missing_metric_error("callbacks.early_stopping.monitor", self.monitor, scores)
        score = float(scores[self.monitor]) * (-1 if self.mode == "max" else 1)
        improved = score < self.best - self.min_gain  # False for NaN
        self.best, self.waited = (score, 0) if improved else (self.best, self.waited + 1)
        if self.waited < self.patience:
            return
        trainer.should_stop = True
        if trainer.is_global_zero:
            print(f"\nstopped early: {self.monitor} did not improve in {self.waited} validations", flush=True)


class EMA(L.Callback):
    """Keeps an exponential moving average of the weights and evaluates with it (Polyak and Juditsky 1992).

    Args:
        decay: Weight of the previous average at each step; in early steps at most (1 + step) / (10 + step).
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
            name: shard_like(loaded.get(name, tensor), tensor).clone().to(tensor.device)
            for name, tensor in tensors.items()
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
