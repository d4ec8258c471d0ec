"""A budget of training time: the learning rate, the validations and the end of a training depend on the clock.

A peer's loop uses `Clock` and `BudgetedSchedule`; a run of ours uses both through a callback in its config:

    PYTHONPATH=benchmarks python train.py trust=time_budget trainer.check_val_every_n_epoch=null \\
        trainer.val_check_interval=1 '+callbacks.budget={_target_: time_budget.TimeBudget, seconds: 1200, points: 8}'
"""

import time
from typing import Any, cast

import lightning as L

from vlm.training.step.optim import Schedule
from vlm.training.step.task import Task

NEVER = 2**62  # more batches than any training has


class Clock:
    """Measures training time: it starts with the first `go`, and stops from each `pause` to the next `go`.

    Args:
        seconds: The budget.
        points: Number of validations, evenly spaced in the budget.
    """

    def __init__(self, seconds: float, points: int) -> None:
        self.seconds, self.points = seconds, points
        self._seconds_spent, self._since = 0.0, 0.0
        self._validated = 0

    def go(self) -> None:
        self._since = self._since or time.perf_counter()

    def pause(self) -> None:
        self._seconds_spent, self._since = self.seconds_spent, 0.0
        self._validated = self._points_reached

    @property
    def seconds_spent(self) -> float:
        """Seconds of training."""
        return self._seconds_spent + (time.perf_counter() - self._since if self._since else 0.0)

    @property
    def due(self) -> bool:
        """True if a validation is due: from each point until the next `pause`."""
        return self._points_reached > self._validated

    @property
    def is_over(self) -> bool:
        return self.seconds_spent >= self.seconds

    @property
    def _points_reached(self) -> int:
        return min(self.points, int(self.points * self.seconds_spent / self.seconds))


class BudgetedSchedule:
    """A schedule that ends with the budget: each step estimates the total number of steps from the speed so far."""

    def __init__(self, schedule: Schedule, clock: Clock) -> None:
        self.schedule, self.clock = schedule, clock

    def factor(self, step: int, total: int = 0) -> float:
        share = max(self.clock.seconds_spent / self.clock.seconds, 1e-9)
        return self.schedule.factor(step, max(step, int((step + 1) / share)))


class TimeBudget(L.Callback):
    """Limits a run of ours to a budget; logs the training time before each validation as `val/train_seconds`.

    Args:
        seconds, points: As in Clock.
    """

    def __init__(self, *, seconds: float, points: int) -> None:
        self.clock = Clock(seconds, points)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        optimization = cast(Task, pl_module).optimization
        assert optimization is not None, "only a training has a budget"
        optimization.schedule = BudgetedSchedule(optimization.schedule, self.clock)

    def on_train_batch_start(self, *args: Any) -> None:
        self.clock.go()  # starts only when the first batch has been read, so starting workers does not count

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.val_check_batch = 1 if self.clock.due else NEVER
        if self.clock.is_over:
            trainer.should_stop = True

    def on_validation_start(self, *args: Any) -> None:
        self.clock.pause()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("val/train_seconds", self.clock.seconds_spent)
