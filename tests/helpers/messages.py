"""Messages between the ranks of a training, counted in the process that sends them."""

from typing import Any

import torch.distributed as dist

NAMES = ("all_reduce", "reduce", "broadcast", "barrier", "all_gather", "all_gather_object", "broadcast_object_list")
FIRST, LAST = 2, 6


def count() -> None:
    """Prints the messages of some optimiser steps, those of gradients left out: DDP sends them from elsewhere."""
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

    sent: list[str] = []
    for name in NAMES:
        setattr(dist, name, _noting(getattr(dist, name), name, sent))
    advance = _TrainingEpochLoop.advance

    def watch_step(loop: Any, *args: Any) -> None:
        sent.clear()
        step = loop.global_step
        advance(loop, *args)
        if FIRST <= step < LAST:
            print(f"MESSAGES {' '.join(sent)}.", flush=True)

    _TrainingEpochLoop.advance = watch_step  # type: ignore[method-assign]


def _noting(send: Any, name: str, sent: list[str]) -> Any:
    def note_call(*args: Any, **kwargs: Any) -> Any:
        sent.append(name)
        return send(*args, **kwargs)

    return note_call
