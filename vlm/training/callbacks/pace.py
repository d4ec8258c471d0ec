"""Prints an estimate of a run's duration after its first steps."""

import time
from collections.abc import Iterator
from typing import Any, cast

import lightning as L

from vlm.io.terminal import folded
from vlm.nn.image_size import ImageSize, as_override, sides
from vlm.training.step import compiling
from vlm.training.step.optim import total_steps
from vlm.training.step.step import accumulates
from vlm.training.step.task import Task

STEPS = 10  # timed steps, after one warm-up step
SHORT, LONG = 60.0, 15 * 60.0  # seconds: a shorter run prints nothing, a longer one prints advice too
FEW_PATCHES = 100  # up to this many, smaller images save little


class Pace(L.Callback):
    """Prints, after ten steps, how long an epoch and the rest of the run take; and what would shorten a long run.

    Validation and torch.compile are not counted.
    """

    def __init__(self) -> None:
        self._timed = self._begin = self._waited = self._paused = self._compiled = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._timed = -1

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin += time.monotonic() - self._paused  # an epoch may be shorter than ten steps

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._timed >= STEPS or accumulates(trainer):
            return
        self._timed += 1
        loader: Any = trainer.train_dataloader
        if self._timed == 0:
            self._begin, self._waited, self._compiled = time.monotonic(), loader.waited, compiling.seconds()
        elif self._timed == STEPS and trainer.is_global_zero:
            spent = time.monotonic() - self._begin - (compiling.seconds() - self._compiled)
            waits = (loader.waited - self._waited) / spent
            task = cast(Task, pl_module)
            if text := "\n".join(lines(trainer, task, step=spent / STEPS, waits=waits)):
                pl_module.print(folded(text))


def lines(trainer: L.Trainer, task: Task, *, step: float, waits: float) -> Iterator[str]:
    """Yields the lines to print: the pace, and for a long run how to shorten it.

    Args:
        step: Seconds of an optimiser step.
        waits: Share of the time in which training waits for data.
    """
    steps = -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches)
    epoch, left = step * steps, step * ((total_steps(trainer) or 0) - trainer.global_step)
    if max(epoch, left) < SHORT:
        return
    text = f"pace        {step:.2g} s a step: about {duration(epoch)} an epoch of {steps:,} steps"
    yield text + (f", {duration(left)} to the end, without validation" if left > 0 else "")
    if left > LONG:
        yield "shorter     " + "; ".join(_advice(trainer, task, step=step, epoch=epoch, waits=waits))


def _advice(trainer: L.Trainer, task: Task, *, step: float, epoch: float, waits: float) -> Iterator[str]:
    """Yields ways to shorten the run."""
    if waits > 0.3:
        yield f"{waits:.0%} of the time it waits for data: smaller files, or more data.num_workers on more cores"
    size = getattr(getattr(task, "preprocess", None), "image_size", 0)
    patches = _patches(task, size)
    if patches > FEW_PATCHES:
        height, width = sides(size)
        half = -(-height // 32) * 16, -(-width // 32) * 16
        fewer = patches * half[0] * half[1] // (height * width)
        yield f"data.image_size={as_override(half)} ({fewer} patches of an image instead of {patches})"
    by_epochs = (trainer.max_epochs or -1) > 0 and epoch <= LONG
    most = f"max_epochs={int(LONG / epoch)}" if by_epochs else f"max_steps={int(LONG / step)}"
    yield f"trainer.{most} ({duration(LONG)})"


def _patches(task: Task, image_size: ImageSize) -> int:
    """Number of states that the model encodes an image into; 0 if unknown."""
    from vlm.models.flop import model_flop

    try:
        return model_flop(task.model, image_size=image_size).states if image_size else 0
    except TypeError:
        return 0


def duration(seconds: float) -> str:
    """Time in words, rounded: 40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
