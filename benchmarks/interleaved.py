"""Times a peer's training steps in the middle of our own training, so that both run under the same conditions."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch

from vlm.training.callbacks.speed import measure_ms, record_time, synchronize


class InterleavedTimer(L.Callback):
    """Times blocks of our steps, everything around them included, and a block of the peer's steps after each.

    Args:
        peer: Takes one training step of the peer.
        block: Number of steps per block.
        rounds: Number of blocks per side, after a first one that does not count.
        units: Units, such as captions, in a step of ours and of the peer; times are per unit.
        device: "cpu" or "cuda"; on "cuda", CUDA events are timed.
    """

    def __init__(
        self,
        peer: Callable[[], Any],
        *,
        block: int,
        rounds: int,
        units: tuple[int, int] = (1, 1),
        device: str = "cpu",
    ) -> None:
        self.peer, self.block, self.rounds, self.units = peer, block, rounds, units
        self.device = torch.device(device)
        self.ours: list[tuple[Any, Any]] = []  # begin and end of each block
        self.theirs: list[tuple[Any, Any]] = []
        self._start: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start = record_time(self.device)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step % self.block:
            return
        self.ours.append((self._start, record_time(self.device)))
        start = record_time(self.device)
        for _ in range(self.block):
            self.peer()
        self.theirs.append((start, record_time(self.device)))
        if len(self.ours) > self.rounds:
            trainer.should_stop = True
        self._start = record_time(self.device)

    def result(self) -> dict[str, float]:
        """Returns seconds per unit of both sides, and how many times as fast ours is: median, minimum and maximum."""
        synchronize(self.device)
        pairs = zip((self.ours, self.theirs), self.units, strict=True)
        ours, theirs = ([measure_ms(*ends) / 1e3 / self.block / unit for ends in blocks[1:]] for blocks, unit in pairs)
        ratios = sorted(peer / own for own, peer in zip(ours, theirs, strict=True))
        return {
            "ours_s": statistics.median(ours),
            "peer_s": statistics.median(theirs),
            "ratio": statistics.median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
        }


def report(rows: dict[str, dict[str, float]], out: str | None) -> None:
    """Prints a table with one line per comparison, and writes it as JSON."""
    print(f"{'':<34}{'ours ms':>10}{'peer ms':>10}{'ratio':>8}{'min':>8}{'max':>8}")
    for name, row in rows.items():
        cells = [row["ours_s"] * 1e3, row["peer_s"] * 1e3]
        ratios = [row[key] for key in ("ratio", "ratio_min", "ratio_max")]
        print(f"{name:<34}" + "".join(f"{x:>10.2f}" for x in cells) + "".join(f"{x:>8.2f}" for x in ratios))
    if out is not None:
        Path(out).write_text(json.dumps(rows, indent=1) + "\n")
