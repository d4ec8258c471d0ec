"""Times of single optimiser steps after a warm-up."""

import statistics
import time
from typing import Any, cast

import lightning as L
import torch

from vlm.training.callbacks.throughput import Throughput
from vlm.training.step.step import accumulates
from vlm.training.step.task import Task


class StepTimes(Throughput):
    """Times each of a number of optimiser steps; logs nothing.

    A step ends when the device has finished it. On a GPU, where the host runs ahead, events are timed.

    Attributes:
        result: The figures; empty until the steps are done.
    Args:
        warm_up: Number of optimiser steps before the timed ones.
        steps: Number of timed steps.
    """

    def __init__(self, *, warm_up: int, steps: int) -> None:
        super().__init__()
        self.warm_up, self.steps = warm_up, steps
        self.result: dict[str, float] = {}
        self._ends: list[Any] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        task = cast(Task, pl_module)
        self.add(task, batch, outputs)
        if accumulates(trainer) or trainer.global_step < self.warm_up:
            return
        if trainer.global_step == self.warm_up:
            finish(task.device)
            self.restart()
        self._ends.append(mark(task.device))
        if len(self._ends) > self.steps:
            finish(task.device)
            self.result = {**self._quantiles(), **self.figures(trainer, task)}

    def _quantiles(self) -> dict[str, float]:
        times = [between(start, end) for start, end in zip(self._ends, self._ends[1:], strict=False)]
        tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
        return {"step_ms": statistics.median(times), "step_ms_p10": tenths[0], "step_ms_p90": tenths[8]}


def mark(device: torch.device) -> Any:
    """A timestamp of a device: an event in its queue, or the time on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Milliseconds between two moments that have passed."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def finish(device: torch.device) -> None:
    """Waits for all work of a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
