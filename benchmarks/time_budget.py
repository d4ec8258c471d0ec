"""A budget of training time: the learning rate, the validations and the end of a training follow the clock.

A peer's loop asks `Clock` and `Timed`; a run of ours takes both as a callback of its config:

    PYTHONPATH=benchmarks python train.py trust=time_budget trainer.check_val_every_n_epoch=null \\
        trainer.val_check_interval=1 '+callbacks.budget={_target_: time_budget.TimeBudget, seconds: 1200, points: 8}'
"""

import time
from typing import Any, cast

import lightning as L

from vlm.training.step.optim import Schedule
from vlm.training.step.task import Task

NEVER = 2**62  # batches, more than any training has


class Clock:
    """Training time. It begins with the first `go`; from a `pause` to the next `go` it stands still.

    Args:
        seconds: The budget.
        points: Validations, at equal parts of it.
    """

    def __init__(self, seconds: float, points: int) -> None:
        self.seconds, self.points = seconds, points
        self._spent, self._since = 0.0, 0.0
        self._validated = 0

    def go(self) -> None:
        self._since = self._since or time.perf_counter()

    def pause(self) -> None:
        self._spent, self._since = self.spent, 0.0
        self._validated = self._reached

    @property
    def spent(self) -> float:
        """Seconds of training."""
        return self._spent + (time.perf_counter() - self._since if self._since else 0.0)

    @property
    def due(self) -> bool:
        """True from each point on until the pause for its validation."""
        return self._reached > self._validated

    @property
    def over(self) -> bool:
        return self.spent >= self.seconds

    @property
    def _reached(self) -> int:
        return min(self.points, int(self.points * self.spent / self.seconds))


class Timed:
    """A schedule that ends with the budget: at each step, its length is what the speed so far makes of the budget."""

    def __init__(self, schedule: Schedule, clock: Clock) -> None:
        self.schedule, self.clock = schedule, clock

    def factor(self, step: int, total: int = 0) -> float:
        share = max(self.clock.spent / self.clock.seconds, 1e-9)
        return self.schedule.factor(step, max(step, int((step + 1) / share)))


class TimeBudget(L.Callback):
    """A run of ours within a budget. It logs `val/train_seconds`, the training time before each validation.

    Args:
        seconds, points: As in Clock.
    """

    def __init__(self, *, seconds: float, points: int) -> None:
        self.clock = Clock(seconds, points)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        optimization = cast(Task, pl_module).optimization
        assert optimization is not None, "only a training has a budget"
        optimization.schedule = Timed(optimization.schedule, self.clock)

    def on_train_batch_start(self, *args: Any) -> None:
        self.clock.go()  # with the first batch there: workers have started

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.val_check_batch = 1 if self.clock.due else NEVER
        if self.clock.over:
            trainer.should_stop = True

    def on_validation_start(self, *args: Any) -> None:
        self.clock.pause()

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("val/train_seconds", self.clock.spent)
