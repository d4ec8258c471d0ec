"""All private names of Lightning that this package uses, so that a new release breaks in one place.

tests/training/step/test_lightning_private.py has a test of each.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.loops import _FitLoop, _TrainingEpochLoop
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher


def log_step_now(trainer: L.Trainer) -> None:
    """Logs the metrics of the current step from a hook of its last batch; the trainer would log after that hook."""
    connector = trainer._logger_connector
    connector.on_batch_end()
    connector.update_train_step_metrics()


def set_logged_step(trainer: L.Trainer, step: int) -> None:
    """Sets the step number under which the trainer logs its next metrics.

    The trainer counts logged steps separately from the optimiser's; after a resume the count is sometimes one too high.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def is_validation_due(trainer: L.Trainer) -> bool:
    """Returns True if a validation follows the last training batch, whether done or still due."""
    fetcher: Any = None  # read only for an iterable of unknown length
    return trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)


def leave_signals_to_us(trainer: L.Trainer) -> None:
    """Keeps the trainer from handling signals.

    Its handler broadcasts, which deadlocks when all ranks get a signal, and under SLURM it saves at once, even in the
    middle of a step.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    # Else ranks share in each batch whether one of those handlers was called, which waits for the device.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def as_between_batches(loops: dict[str, Any], *, epoch_batches: int, step: int, validation_due: bool = False) -> None:
    """Sets the saved state of a fit loop to the state between two batches, whichever hook saves.

    Lightning counts a batch as completed only after the hooks that save, and repeats or skips work on resume depending
    on which hook that was. A save happens after an optimiser step, so the batch is done; a full epoch is over, unless
    its validation is still to come.

    Args:
        loops: The state.
        epoch_batches: Training batches of an epoch.
        step: Optimiser steps done.
        validation_due: Whether a resumed run starts with a validation.
    """
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    over = batches["current"]["ready"] >= epoch_batches and not validation_due
    val_started = int(validation_due)
    for span in ("total", "current"):
        done = batches[span]["ready"]
        batches[span].update(started=done, processed=done, completed=done)
        finished = epochs[span]["ready"] if over else epochs[span]["ready"] - 1
        epochs[span].update(started=epochs[span]["ready"], processed=finished, completed=finished)
        # The trainer goes back to a validation whose first batch was begun.
        loops["epoch_loop.val_loop.batch_progress"][span].update(
            ready=val_started, started=val_started, processed=0, completed=0
        )
    if over:
        batches["current"].update(ready=0, started=0, processed=0, completed=0)
    batches["is_last_batch"] = False
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] = step  # which `set_logged_step` sets again


class TrainingEpochLoop(_TrainingEpochLoop):
    """Lightning's loop over the batches of an epoch, which also validates after the last step of `max_steps`."""

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        is_last_step = 0 <= self.max_steps <= self.global_step
        return super()._should_check_val_fx(data_fetcher) or (is_last_step and self._should_check_val_epoch())

    @property
    def is_validation_pending(self) -> bool:
        """Whether a resumed run has yet to repeat an interrupted validation."""
        progress: Any = self.val_loop.batch_progress.current  # its type lacks two of the counts
        return self.restarting and progress.started > progress.processed and self._should_check_val_fx(None)


class FitLoop(_FitLoop):
    """Lightning's loop over epochs, which also repeats a validation that was interrupted after the last step."""

    epoch_loop: TrainingEpochLoop

    @property
    def done(self) -> bool:
        return super().done and not self.epoch_loop.is_validation_pending


def replace_loops(trainer: L.Trainer) -> None:
    """Replaces the trainer's loops by `FitLoop` and `TrainingEpochLoop`."""
    before = trainer.fit_loop
    trainer.fit_loop = FitLoop(trainer, min_epochs=before.min_epochs, max_epochs=before.max_epochs)
    trainer.fit_loop.epoch_loop = TrainingEpochLoop(trainer, min_steps=before.min_steps, max_steps=before.max_steps)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of a process for each further device, with its steps as methods."""

    def start_children(self) -> None:
        """Starts the processes of the other devices."""
        self._call_children_scripts()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function with a fair share of the threads."""
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def use_launcher(trainer: L.Trainer, launcher: type[ScriptLauncher]) -> None:
    """Replaces Lightning's launcher, if the trainer starts further processes."""
    current = trainer.strategy.launcher
    if type(current) is _SubprocessScriptLauncher:
        trainer.strategy._launcher = launcher(current.cluster_environment, current.num_processes, current.num_nodes)


def shard_over_all_ranks(strategy: ModelParallelStrategy, ranks: int) -> None:
    """Sets the sizes of a ModelParallelStrategy's mesh: data parallel over all ranks, and nothing else."""
    strategy._data_parallel_size, strategy._tensor_parallel_size = ranks, 1
