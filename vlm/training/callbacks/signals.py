"""Stops a run on a signal and saves its state."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT

from vlm.data.batch import Batch
from vlm.data.workers import end_workers
from vlm.training.callbacks.checkpoints import Checkpoints
from vlm.training.step.lightning_private import is_validation_due, log_step_now
from vlm.training.step.step import StepState, is_mid_step
from vlm.training.step.task import Task

CLEAR_LINE = b"\r\033[K"  # clears the line of the terminal with the progress bar and ^C
INTERRUPT_NOTICE = b"saving after this step, then stopping; a second signal stops without saving\n"


class RunInterrupted(BaseException):
    """Raised when a signal stops the run. Like KeyboardInterrupt, it is not an Exception.

    Args:
        signum: The signal.
        saved: Whether all processes wrote `last.ckpt` because of it.
    """

    def __init__(self, signum: int, *, saved: bool) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum, self.saved = signum, saved
        self.status = 128 + signum


def list_stop_signals() -> list[signal.Signals]:
    """Returns the signals that stop a run. SLURM sends SIGUSR1 shortly before the time limit."""
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if "SLURM_JOB_ID" in os.environ else [])]


@contextmanager
def raise_on_signal() -> Iterator[None]:
    """Context in which a signal stops the run immediately, for phases with nothing to save."""
    owner_pid = os.getpid()

    def handle(signum: int, frame: FrameType | None) -> None:
        if os.getpid() == owner_pid:  # not in a data loader worker, which its owner stops
            raise RunInterrupted(signum, saved=False)

    before = {signum: signal.signal(signum, handle) for signum in list_stop_signals()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class StopOnSignal(L.Callback):
    """On a signal, finishes the optimiser step, saves `last.ckpt` and ends the run; a second signal kills it.

    The handler only sets a flag, because a signal may interrupt any code. Ranks exchange the flag once per optimiser
    step (`StepState.agreed`), so that all stop after the same step. A validation that is due or running is repeated by
    the resumed run, because it may take longer than the remaining time.
    """

    def __init__(self) -> None:
        self.step: StepState | None = None
        self._before: dict[int, Any] = {}
        self._common_batches = 0

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        assert self.step is not None, "the handler is installed when training starts"
        if self.step.received:
            end_workers()
            os._exit(128 + signum)
        self.step.received = signum
        if self.step.trainer.is_global_zero:  # not by print, which the signal may have interrupted
            os.write(2, (CLEAR_LINE if os.isatty(2) else b"") + INTERRUPT_NOTICE)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.step = cast(Task, pl_module).step
        for signum in list_stop_signals():
            self._before[signum] = signal.signal(signum, self._handle)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if is_mid_step(trainer):
            return
        step = cast(Task, pl_module).step
        signum = step.received if trainer.world_size == 1 else step.agreed
        if signum:
            log_step_now(trainer)
            find_checkpoints(trainer).save_last(trainer, validation_due=is_validation_due(trainer))
            raise RunInterrupted(signum, saved=True)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Ranks may differ by one batch; they can communicate only at batches that all of them have.
        self._common_batches = _reduce(trainer, int(trainer.num_val_batches[0]), "MIN")

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn != "fit" or batch_idx >= self._common_batches:
            return
        if is_mid_step(trainer):  # a run cannot be resumed in the middle of an optimiser step
            return
        signum = self._find_common_signal(trainer)
        if signum:
            find_checkpoints(trainer).save_last(trainer, validation_due=True)
            raise RunInterrupted(signum, saved=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        signum = self._find_common_signal(trainer)
        if signum:
            raise RunInterrupted(signum, saved=True)

    def _find_common_signal(self, trainer: L.Trainer) -> int:
        """Returns the signal that any rank received, the same on all ranks; 0 for none."""
        return _reduce(trainer, cast(Task, trainer.lightning_module).step.received, "MAX")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before.clear()


def _reduce(trainer: L.Trainer, value: int, reduce_op: str) -> int:
    """Returns the minimum or maximum over all ranks; a single process does not wait for the device."""
    if trainer.world_size == 1:
        return value
    tensor = torch.tensor(value, device=trainer.strategy.root_device)
    # The strategy's own reduction would wait at a barrier first.
    torch.distributed.all_reduce(tensor, getattr(torch.distributed.ReduceOp, reduce_op))
    return int(tensor)


def find_checkpoints(trainer: L.Trainer) -> Checkpoints:
    """Returns the trainer's Checkpoints callback."""
    return next(c for c in trainer.callbacks if isinstance(c, Checkpoints))  # type: ignore[attr-defined]
