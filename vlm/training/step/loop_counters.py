"""Progress of a run: its length in optimiser steps, and the trainer's own counters in a checkpoint."""

from typing import Any

import lightning as L


def total_steps(trainer: L.Trainer) -> int:
    """Optimiser steps of the whole run.

    The trainer's own estimate would make the training loader before a resumed run knows where it stands.
    """
    batches = trainer.datamodule.train_batches()  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    epochs = trainer.max_epochs or -1
    steps = -(-batches // trainer.accumulate_grad_batches) * epochs if epochs > 0 else -1
    limits = [count for count in (steps, trainer.max_steps) if count > 0]
    return min(limits, default=1)


def validates(trainer: L.Trainer) -> bool:
    """True where a validation follows the last training batch, be it done or still to come."""
    loop = trainer.fit_loop
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]


def validates_regularly(trainer: L.Trainer) -> bool:
    """True where a validation follows the last training batch by its interval, and not because the run ends there."""
    stop, trainer.should_stop = trainer.should_stop, False
    try:
        return validates(trainer)
    finally:
        trainer.should_stop = stop


def out_of_steps(trainer: L.Trainer) -> bool:
    """True once `trainer.max_steps` is reached: the trainer would not start again for a validation that is due."""
    return 0 <= trainer.max_steps <= trainer.global_step


def settle(
    loops: dict[str, Any], *, epoch_batches: int, step: int, validates: bool = False, validation_due: bool = False
) -> None:
    """Writes the trainer's counters as they stand between two batches, wherever in a batch they were read.

    Lightning counts a batch as completed only after the hooks that save, and repeats or skips work on resume depending
    on which hook that was. A save happens after an optimiser step, so the batch is done; a full epoch is over, unless
    its validation is still to come.

    Args:
        loops: The state of the trainer's fit loop.
        epoch_batches: Training batches of an epoch.
        step: Optimiser steps done.
        validates: Whether a regular validation follows this batch.
        validation_due: Whether it is still to come: a resumed run starts with it.
    """
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    over = batches["current"]["ready"] >= epoch_batches and not validation_due
    begun = int(validation_due)
    for span in ("total", "current"):
        done = batches[span]["ready"]
        batches[span].update(started=done, processed=done, completed=done)
        finished = epochs[span]["ready"] if over else epochs[span]["ready"] - 1
        epochs[span].update(started=epochs[span]["ready"], processed=finished, completed=finished)
        # The trainer goes back to a validation whose first batch was begun.
        loops["epoch_loop.val_loop.batch_progress"][span].update(ready=begun, started=begun, processed=0, completed=0)
    if over:
        batches["current"].update(ready=0, started=0, processed=0, completed=0)
    batches["is_last_batch"] = False
    # The trainer returns to the end of a batch that a validation follows, even if only to skip it, and counts it there.
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step - (validates and not over)
