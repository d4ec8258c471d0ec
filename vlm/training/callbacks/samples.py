"""Scores of each validation in a line, and outputs of the model for a few of its inputs."""

import json
import sys
from pathlib import Path
from typing import Annotated, cast

import lightning as L

from vlm.errors import Range, printable
from vlm.io.atomic import write_text
from vlm.io.terminal import folded, line_width
from vlm.training.callbacks.fault_tolerant_logger import FaultTolerantLogger
from vlm.training.step.task import Task


class Samples(L.Callback):
    """Prints the main scores of each validation and a few samples of the last one, and writes samples/ and to loggers.

    A captioner's samples are written in COCO's result format with references and loss, one per line; `vlm score` reads
    them if they are in one language.

    Args:
        show: Number of samples to print, and of those that loggers of images get.
        keep: Number of samples to write to samples/step_N.jsonl.
        every_validation: Print samples of every validation instead of the last one only.
    """

    def __init__(
        self, *, show: Annotated[int, Range(0)], keep: Annotated[int, Range(0)], every_validation: bool = False
    ) -> None:
        self.show, self.keep, self.every_validation = show, keep, every_validation
        self._lines: list[str] = []  # of the last validation, until they are printed

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        task = cast(Task, pl_module)
        samples = task.evaluation.samples
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        print(printable(score_line(task, trainer.global_step)), flush=True)
        # Evenly spaced, because samples of class folders are ordered by class.
        shown = samples[:: max(1, len(samples) // max(1, self.show))][: self.show]
        self._lines = [f"({task.remark})"] if task.remark else []
        for sample in shown:  # several lines have a common indentation
            self._lines += [f"{'    ' if at else '  '}{line}" for at, line in enumerate(sample["line"].split("\n"))]
        if self.every_validation:
            self._print_lines()
        if not samples:
            return
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

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._lines:
            marked = any(line.startswith("  = ") for line in self._lines)
            print(f"\nsamples of the last validation{' (= marks those that are right)' * marked}")
            self._print_lines()

    def _print_lines(self) -> None:
        print("\n".join(folded(printable(line)) for line in self._lines), flush=True)
        self._lines = []


def score_line(task: Task, step: int) -> str:
    """Returns the step with the scores of the last validation; on a terminal, with as many as fit in a line.

    All scores are in metrics.csv.
    """
    results = {name.removeprefix("val/"): value for name, value in task.evaluation.results.items()}
    names = [name for name in ("loss", *task.headlines) if name in results]
    names += [name for name in results if name not in names]
    line, width = f"step {step}:", line_width(sys.stdout)
    for number, name in enumerate(names):
        longer = f"{line}{'  ' if number else ' '}{name} {results[name]:.4f}"
        if width is not None and len(longer) > width:
            break
        line = longer
    return line
