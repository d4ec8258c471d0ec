"""Stops a run that no longer improves."""

import math
from typing import Annotated, Any, Literal

import lightning as L

from vlm.errors import Count, Range
from vlm.training.callbacks.checkpoints import not_logged, same_metric


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
