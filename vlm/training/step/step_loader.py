"""Training batches by optimiser step, for losses whose terms are scaled by counts of the entire step."""

import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from vlm.data.batch import Batch


class StepLoader(DataLoader):
    """A training loader that sets the counts of a step's loss terms before it yields the step's first batch.

    If a task has counts (`Task.counts`), all batches of a step are read before the first of them is trained on. No
    state is kept: a step ends where the trainer ends it, at a multiple of `accumulate_grad_batches` or with the epoch.

    Attributes:
        asked: Time of the request for the last batch, by time.perf_counter.
        waited: Seconds that training has waited for batches.
    Args:
        trainer: The trainer of the task.
        dataset, options: As in DataLoader.
    """

    def __init__(self, trainer: L.Trainer, dataset: Any, **options: Any) -> None:
        self.trainer = trainer
        self.asked = self.waited = 0.0
        super().__init__(dataset, **options)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        return self._measure_wait(self._by_step(super().__iter__()))  # workers start here, and not with the first batch

    def _measure_wait(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            self.asked = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - self.asked
            yield batch

    def _by_step(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        task: Any = self.trainer.lightning_module
        for first in batches:
            counts = task.counts(first)
            if counts is None:
                yield first
                continue
            done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
            accumulated = self.trainer.accumulate_grad_batches
            size = min(accumulated - done % accumulated, int(self.trainer.num_training_batches) - done)
            total = Counter(counts)
            step = [first, *islice(batches, size - 1)]
            for batch in step[1:]:
                total.update(task.counts(batch))
            task.step.counts = total
            yield from step
