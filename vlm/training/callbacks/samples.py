"""Outputs of the model for a few inputs of each validation."""

import json
from pathlib import Path
from typing import Annotated, cast

import lightning as L

from vlm.errors import Range, printable
from vlm.io.atomic import write_text
from vlm.io.terminal import folded
from vlm.training.callbacks.fault_tolerant_logger import FaultTolerantLogger
from vlm.training.step.task import Task


class Samples(L.Callback):
    """Prints a few samples of each validation, which loggers of images get too, and writes more to samples/.

    A captioner's samples are written in COCO's result format with references and loss, one per line; `vlm score` reads
    them if they are in one language.

    Args:
        show: Number of samples to print.
        keep: Number of samples to write to samples/step_N.jsonl.
    """

    def __init__(self, *, show: Annotated[int, Range(0)], keep: Annotated[int, Range(0)]) -> None:
        self.show, self.keep = show, keep

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        task = cast(Task, pl_module)
        samples = task.evaluation.samples
        if trainer.sanity_checking or not trainer.is_global_zero or not samples:
            return
        # Evenly spaced, because samples of class folders are ordered by class.
        shown = samples[:: max(1, len(samples) // max(1, self.show))][: self.show]
        lines = [f"  {sample['line']}" for sample in shown]
        results = task.evaluation.results
        scores = "  ".join(f"{name.removeprefix('val/')} {value:.4f}" for name, value in results.items())
        remark = [f"  ({task.remark})"] if task.remark else []
        lines = [f"step {trainer.global_step}: {scores}", *remark, *lines]
        print("\n".join(["", *(folded(printable(line)) for line in lines)]), flush=True)
        folder = Path(trainer.default_root_dir) / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        kept = [
            {name: value for name, value in sample.items() if name not in ("image", "line")}
            for sample in samples[: self.keep]
        ]
        text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in kept)
        write_text(folder / f"step_{trainer.global_step}.jsonl", text)
        for logger in trainer.loggers:
            if isinstance(logger, FaultTolerantLogger):
                logger.log_samples(shown, trainer.global_step)
