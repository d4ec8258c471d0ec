"""Callbacks that print the first batch, the progress, and the scores and samples of validations."""

import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import lightning as L
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.types import STEP_OUTPUT
from tqdm import tqdm

from vlm.data.batch import Batch
from vlm.data.fields import CaptionField
from vlm.data.text.conversation_field import ConversationField
from vlm.errors import Count, Range, printable
from vlm.io.files import write_text
from vlm.io.terminal import fold, line_width
from vlm.training.callbacks.loggers import FaultTolerantLogger
from vlm.training.data_module import Data
from vlm.training.step.optim import total_steps
from vlm.training.step.task import Task


class ShowFirstBatch(L.Callback):
    """Prints a header and, before the first step, the parameter counts and the inputs and targets of one sample.

    They reveal wrongly shifted labels, a missing end token or wrong classes.

    Args:
        tokens: Maximum number of tokens to print per text.
    """

    def __init__(self, *, tokens: Count = 16) -> None:
        self.tokens = tokens

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.print(fold("\n".join(map(printable, format_header(trainer)))))  # above the progress bar

    @rank_zero_only
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step == 0 and batch_idx == 0 and len(batch.ids):
            task = cast(Task, pl_module)
            lines = [*format_model(task), *task.reading(batch, self.tokens)]
            pl_module.print(fold("\n".join(map(printable, lines))))


def format_header(trainer: L.Trainer) -> list[str]:
    """Returns lines with the folder, device, precision and split sizes of a run."""
    device, data = trainer.strategy.root_device, cast(Data, trainer.datamodule)  # type: ignore[attr-defined]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    count = f"{trainer.world_size} x {name}" if trainer.world_size > 1 else name
    sizes = ", ".join(f"{split} {len(samples):,}" for split, samples in data.splits.items())
    return [
        f"run         {trainer.default_root_dir}",
        f"device      {count}, {trainer.precision}",
        f"data        {sizes}",
    ]


def format_model(task: Task) -> Iterator[str]:
    """Yields the parameter counts of the model and its parts, and a line per field whose texts exceed the maximum."""
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in task.model.named_children()}
    total = sum(p.numel() for p in task.model.parameters())
    trained = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    yield f"parameters  {total:,} ({parts}); {'all' if trained == total else f'{trained:,}'} are trained"
    for field in task.fields.values():
        if isinstance(field, CaptionField) and field.truncated:
            kind = "conversations" if isinstance(field, ConversationField) else "different captions"
            excess = f"{field.truncated:,} {kind} exceed data.max_len={field.max_len} tokens"
            yield f"truncated   {excess}; raise it to train on the full texts"


TERMINAL_SECONDS, FILE_SECONDS = 0.5, 60.0  # between updates in a terminal, and between lines in a file
RATE_SECONDS = 2.0  # over which a rate is measured
BAR, REMAINING = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}", ", {remaining} left"  # fits 80 columns


class Progress(ProgressBar):
    """Shows optimiser steps, the remaining time, loss, samples (or tokens) per second, and the learning rate.

    In a terminal it is a bar, updated twice a second; in a file, one line per minute. During validations and the test
    it shows completed batches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.terminal, self.is_enabled = sys.stderr.isatty(), True
        self.bar: tqdm | None = None
        self._last_update = self._since = self._rate = 0.0
        self._done = 0

    def disable(self) -> None:
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        if self.is_enabled:
            tqdm.write(sep.join(map(str, args)), file=sys.stdout, **kwargs)  # above the bar

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        total, max_steps = total_steps(trainer), trainer.max_steps
        if total is not None and total < max_steps:
            self.print(
                f"note: trainer.max_epochs={trainer.max_epochs} ends the training after {total:,} steps, before "
                f"trainer.max_steps={max_steps:,}; raise max_epochs to reach it"
            )
        self._open_bar(total, at=trainer.global_step)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        task = cast(Task, pl_module)
        self._done += task.size(batch) * trainer.world_size
        spent = time.monotonic() - self._since
        if spent > RATE_SECONDS or not self._rate:
            self._rate = self._done / spent
        if spent > RATE_SECONDS:
            self._restart_rate()
        if self._is_due():
            texts = [f"{name} {float(value):.3g}" for name, value in trainer.progress_bar_metrics.items()]
            texts += [] if task.step.loss is None else [f"loss {task.step.loss:.3f}"]
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self._update_bar(trainer.global_step, *texts, f"{self._rate:.0f} {task.unit}/s", f"lr {rate:.1e}")

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._is_due():
            self._update_bar(trainer.global_step, f"validation {batch_idx + 1}/{int(sum(trainer.num_val_batches))}")

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._update_bar(trainer.global_step, "validation: scores")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.bar is not None:
            self.bar.clear()  # because other callbacks print now
        self._restart_rate()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close_bar()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._open_bar(int(sum(trainer.num_test_batches)), title="test ")

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._is_due():
            self._update_bar(batch_idx + 1)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._update_bar(int(sum(trainer.num_test_batches)), "scores")

    on_test_end = on_train_end

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close_bar()

    def _open_bar(self, total: int | None, *, at: int = 0, title: str = "") -> None:
        self._restart_rate()
        if self.is_enabled:
            file = sys.stderr if self.terminal else io.StringIO()
            options: Any = {"dynamic_ncols": True, "leave": False, "position": 0, "smoothing": 0}
            self.bar = tqdm(desc=title, total=total, initial=at, file=file, delay=1, **options)  # not drawn yet
            self.bar.delay = 0

    def _close_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _restart_rate(self) -> None:
        """Restarts the measurement of the rate."""
        self._done, self._since = 0, time.monotonic()

    def _is_due(self) -> bool:
        period = TERMINAL_SECONDS if self.terminal else FILE_SECONDS
        return self.bar is not None and time.monotonic() - self._last_update > period

    def _update_bar(self, done: int, *texts: str) -> None:
        if (bar := self.bar) is None:
            return
        self._last_update, bar.n = time.monotonic(), done
        counts = BAR + REMAINING * (done > bar.initial) if bar.total else "{desc}{n_fmt} steps, {elapsed}"
        bar.bar_format = counts + "{postfix}"
        bar.set_postfix_str(", ".join(texts), refresh=self.terminal)
        if not self.terminal:
            print(bar, file=sys.stderr, flush=True)


class Samples(L.Callback):
    """Prints the main scores of each validation and samples of the last one; writes samples to samples/ and loggers.

    Samples of a captioner are written as JSON lines in COCO's result format, with references and loss; `vlm score`
    reads them if all are in the same language.

    Args:
        show: Number of samples to print and to send to loggers.
        keep: Number of samples to write to samples/step_N.jsonl.
        every_validation: Print samples of every validation instead of the last one only.
    """

    def __init__(
        self, *, show: Annotated[int, Range(0)], keep: Annotated[int, Range(0)], every_validation: bool = False
    ) -> None:
        self.show, self.keep, self.every_validation = show, keep, every_validation
        self._lines: list[str] = []  # samples of the last validation that are not printed yet

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        task = cast(Task, pl_module)
        samples = task.evaluation.samples
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        print(printable(score_line(task, trainer.global_step)), flush=True)
        # Evenly spaced, because samples of class folders are ordered by class.
        selected = samples[:: max(1, len(samples) // max(1, self.show))][: self.show]
        self._lines = [f"({task.remark})"] if task.remark else []
        for sample in selected:  # the further lines of a sample are indented
            self._lines += [
                f"{'    ' if index else '  '}{line}" for index, line in enumerate(sample["line"].split("\n"))
            ]
        if self.every_validation:
            self._print_lines()
        if not samples:
            return
        folder = Path(trainer.default_root_dir) / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        records = [
            {name: value for name, value in sample.items() if name not in ("image", "line")}
            for sample in samples[: self.keep]
        ]
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_text(folder / f"step_{trainer.global_step}.jsonl", text)
        for logger in trainer.loggers:
            if isinstance(logger, FaultTolerantLogger):
                logger.log_samples(selected, trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._lines:
            has_marks = any(line.startswith("  = ") for line in self._lines)
            print(f"\nsamples of the last validation{' (= marks correct ones)' * has_marks}")
            self._print_lines()

    def _print_lines(self) -> None:
        print("\n".join(fold(printable(line)) for line in self._lines), flush=True)
        self._lines = []


def score_line(task: Task, step: int) -> str:
    """Returns a line with the step and the scores of the last validation, as many as fit the terminal.

    metrics.csv has all scores.
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
