"""Skips and counts unreadable training samples, and stops the run if there are too many."""

from collections.abc import Sequence
from typing import cast

import lightning as L
import torch.distributed as dist
from lightning.pytorch.utilities.types import STEP_OUTPUT

from vlm.data.batch import BadSample, Batch
from vlm.errors import Share, SharedError, printable
from vlm.training.step.task import Task

MAX_LISTED = 10  # samples in the error message
LIMIT = 0.01  # accepted share of unreadable samples


class BadSamples(L.Callback):
    """Reports every unreadable training sample once and stops the run if there are too many, over all ranks.

    Args:
        limit: Share of the training split that may be unreadable; 0 stops at the first.
    """

    def __init__(self, *, limit: Share = LIMIT) -> None:
        self.limit = limit
        self.reasons: dict[str, str] = {}
        self._unsent: list[BadSample] = []  # found by this rank and not yet sent to the other ranks

    def state_dict(self) -> dict[str, dict[str, str]]:
        return {"reasons": self.reasons}

    def load_state_dict(self, state_dict: dict[str, dict[str, str]]) -> None:
        self.reasons = dict(state_dict["reasons"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._check(trainer)  # a resumed run may have another limit

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        task = cast(Task, pl_module)
        for reason in task.evaluation.unreadable:
            print(f"skipped in validation: {printable(reason)}", flush=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        self._unsent += batch.bad
        step = cast(Task, pl_module).step
        if trainer.world_size > 1 and not step.bad_samples:  # no rank has reported any
            return
        bad = [self._unsent]
        if trainer.world_size > 1:  # all ranks have those of all ranks, so that they stop together
            bad = [[] for _ in range(trainer.world_size)]
            dist.all_gather_object(bad, self._unsent)
        self._unsent, step.bad_samples = [], 0
        new = [sample for samples in bad for sample in samples if sample.id not in self.reasons]
        self.reasons |= {sample.id: sample.reason for sample in new}
        if new and trainer.is_global_zero:
            pl_module.print("\n".join(f"skipped: {printable(sample.reason)}" for sample in new))
        if new:
            self._check(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.reasons and trainer.is_global_zero:
            print(
                f"\nskipped {len(self.reasons)} of {_count_samples(trainer)} training samples, which could not be read",
                flush=True,
            )

    def _check(self, trainer: L.Trainer) -> None:
        check_unreadable(list(self.reasons.values()), _count_samples(trainer), self.limit)


def check_unreadable(reasons: Sequence[str], samples: int, limit: float) -> None:
    """Checks that the share of unreadable training samples is within the limit.

    Args:
        reasons: The error of each unreadable sample.
        samples: Number of training samples.
        limit: Accepted share.
    Raises:
        SharedError: More samples are unreadable.
    """
    if len(reasons) > limit * samples:
        raise SharedError(
            f"{len(reasons)} of {samples} training samples could not be read, more than "
            f"callbacks.bad_samples.limit={limit:g} allows; fix or remove them, or raise it:\n"
            + "; ".join(reasons[:MAX_LISTED]),
            1,
        )


def _count_samples(trainer: L.Trainer) -> int:
    return len(trainer.datamodule.split("train"))  # type: ignore[attr-defined]
