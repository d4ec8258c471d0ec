"""Samples that cannot be read: skipped, counted, named, limited."""

from typing import Any, cast

import lightning as L

from vlm.errors import UserError
from vlm.tasks.base import Task


class BadSamples(L.Callback):
    """Names every unreadable training sample once and stops the run when there are too many.

    Args:
        limit: Share of the training split that may be unreadable.
    """

    def __init__(self, *, limit: float = 0.01) -> None:
        self.limit = limit
        self.reasons: dict[str, str] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"reasons": self.reasons}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reasons = dict(state_dict["reasons"])

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        task = cast(Task, pl_module)
        for reason in task.unread:
            print(f"skipped in validation: {reason}", flush=True)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for sample in batch.bad:
            if sample.id not in self.reasons:
                self.reasons[sample.id] = sample.reason
                print(f"skipped: {sample.reason}", flush=True)
        size = len(trainer.datamodule.split("train"))  # type: ignore[attr-defined]
        if batch.bad and len(self.reasons) > self.limit * size:
            listed = "; ".join(list(self.reasons.values())[:10])
            raise UserError(
                f"{len(self.reasons)} of {size} training samples could not be read, more than "
                f"callbacks.bad_samples.limit={self.limit:g} allows:\n{listed}",
                1,
            )
