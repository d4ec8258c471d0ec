"""Callbacks that measure the speed of training: estimates, step times, throughput and compile times."""

import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, cast

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from vlm.data.batch import Batch
from vlm.io.terminal import fold
from vlm.models.flop import Flop, model_flop
from vlm.nn.image_size import ImageSize, as_override, sides
from vlm.training.data_module import StepLoader
from vlm.training.step import blocks as compiling
from vlm.training.step.optim import total_steps
from vlm.training.step.step import is_logged, is_mid_step, sum_over_ranks
from vlm.training.step.task import Task


class CompileMessages(L.Callback):
    """Prints that the first steps compile, and how long compilation took."""

    def __init__(self) -> None:
        self._before: float | None = None

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._before = compiling.seconds()
        pl_module.print("compile     compiling the model's blocks during the first steps; takes half a minute or more")
        if pl_module.device.type == "cpu":
            pl_module.print("            on a CPU this gains nothing (docs/scaling.md); compile=false starts sooner")

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        if self._before is None:
            return
        spent = compiling.seconds()
        if spent == self._before:
            pl_module.print(f"compiled    in {spent:.0f} s; batches of other sizes may need further compilation")
            self._before = None
        else:
            self._before = spent


Timestamp: TypeAlias = "float | torch.cuda.Event"
TIMED_STEPS = 10  # after one warm-up step
SHORT_RUN, LONG_RUN = 60.0, 15 * 60.0  # seconds: shorter runs print nothing, longer runs print advice
FEW_PATCHES = 100  # up to this number, smaller images save little time


class Pace(L.Callback):
    """Prints, after ten steps, the estimated time of an epoch and of the run, and how to shorten a long run.

    Validation and compilation are not counted.
    """

    def __init__(self) -> None:
        self._timed = self._begin = self._waited = self._paused = self._compiled = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._timed = -1

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin += time.monotonic() - self._paused  # an epoch may be shorter than ten steps

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        if self._timed >= TIMED_STEPS or is_mid_step(trainer):
            return
        self._timed += 1
        loader = cast(StepLoader, trainer.train_dataloader)
        if self._timed == 0:
            self._begin, self._waited, self._compiled = time.monotonic(), loader.waited, compiling.seconds()
        elif self._timed == TIMED_STEPS and trainer.is_global_zero:
            spent = time.monotonic() - self._begin - (compiling.seconds() - self._compiled)
            waits = (loader.waited - self._waited) / spent
            task = cast(Task, pl_module)
            if text := "\n".join(format_pace(trainer, task, step=spent / TIMED_STEPS, waits=waits)):
                pl_module.print(fold(text))


def format_pace(trainer: L.Trainer, task: Task, *, step: float, waits: float) -> Iterator[str]:
    """Yields lines with the estimated times and, for a long run, ways to shorten it.

    Args:
        step: Seconds per optimiser step.
        waits: Share of the time that training waits for data.
    """
    steps = -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches)
    epoch, remaining = step * steps, step * ((total_steps(trainer) or 0) - trainer.global_step)
    if max(epoch, remaining) < SHORT_RUN:
        return
    text = f"pace        {step:.2g} s per step, about {format_duration(epoch)} per epoch of {steps:,} steps"
    yield text + (f", {format_duration(remaining)} remaining, without validation" if remaining > 0 else "")
    if remaining > LONG_RUN:
        yield "shorter     " + "; ".join(_advice(trainer, task, step=step, epoch=epoch, waits=waits))


def _advice(trainer: L.Trainer, task: Task, *, step: float, epoch: float, waits: float) -> Iterator[str]:
    """Yields ways to shorten the run."""
    if waits > 0.3:
        remedy = "use smaller files, or more data.num_workers on more cores"
        yield f"{waits:.0%} of the time is spent waiting for data: {remedy}"
    size: ImageSize = getattr(task.preprocess, "image_size", 0)
    patches = 0
    if size:
        with suppress(TypeError):  # a custom model without a FLOP count
            patches = model_flop(task.model, image_size=size).states
    if patches > FEW_PATCHES:
        height, width = sides(size)
        half = -(-height // 32) * 16, -(-width // 32) * 16
        fewer = patches * half[0] * half[1] // (height * width)
        yield f"data.image_size={as_override(half)} ({fewer} patches per image instead of {patches})"
    by_epochs = (trainer.max_epochs or -1) > 0 and epoch <= LONG_RUN
    limit = f"max_epochs={int(LONG_RUN / epoch)}" if by_epochs else f"max_steps={int(LONG_RUN / step)}"
    yield f"trainer.{limit} ({format_duration(LONG_RUN)})"


def format_duration(seconds: float) -> str:
    """Formats a rounded duration: 40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


# Peak FLOP/s of dense matrix products in 16 bits, in TF32 and in plain 32 bits. Where a source includes a factor of two
# for sparse matrices, it is removed. Sources: NVIDIA's data sheets of the H200, H100, A100, L40S and L4, and the
# white papers of the Ada and Ampere GeForce cards (16 bits, summed in 32). The keys are full device names.
PEAKS = {
    "NVIDIA H200": (989e12, 494e12, 67e12),
    "NVIDIA H100 80GB HBM3": (989e12, 494e12, 67e12),
    "NVIDIA H100 PCIe": (756e12, 378e12, 51e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 156e12, 19.5e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 156e12, 19.5e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 156e12, 19.5e12),
    "NVIDIA A100 80GB PCIe": (312e12, 156e12, 19.5e12),
    "NVIDIA L40S": (362e12, 183e12, 91.6e12),
    "NVIDIA L4": (121e12, 60e12, 30.3e12),
    "NVIDIA GeForce RTX 4090": (165.2e12, 82.6e12, 82.6e12),
    "NVIDIA GeForce RTX 3090": (71e12, 35.6e12, 35.6e12),
}


class Throughput(L.Callback):
    """Logs as `throughput/...`, at the trainer's logging interval, over the steps since the last log:

    - `images_per_s`, `tokens_per_s`: over all devices; tokens that the loss counts, without padding. A task that
      counts texts or words has `texts_per_s` or `words_per_s`.
    - `data_wait`: share of the time that training waited for its data loader, averaged over ranks.
    - `flop_per_s`: over all devices, as vlm.models.flop counts; `mfu`: its share of the peak, if PEAKS has the device.
    - `peak_memory_gib`: peak memory so far: of torch's tensors on a GPU, else of this process without its workers.

    Validation and compilation are not counted. The device is synchronized only for logging.
    """

    def __init__(self) -> None:
        self.flop: Flop | None = None
        self._since = self._compiled = self._paused = 0.0
        self._counted: Tensor | float = 0.0
        self.loader: Any = None  # StepLoader, once training starts
        self.restart()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        task = cast(Task, pl_module)
        self.flop = None
        with suppress(TypeError):  # a custom model without a FLOP count
            self.flop = model_flop(task.model, image_size=getattr(task.preprocess, "image_size", 0))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.loader = trainer.train_dataloader
        self.restart()

    def restart(self) -> None:
        """Restarts the measurement."""
        self._since, self._compiled = time.perf_counter(), compiling.seconds()
        self._waited = self.loader.waited if self.loader else 0.0
        self._images, self._tokens, self._flop, self._counted = 0, False, 0.0, 0.0

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        task = cast(Task, pl_module)
        self.add(task, batch, outputs)
        if is_logged(trainer.global_step, trainer) and not is_mid_step(trainer):
            figures = {f"throughput/{name}": value for name, value in self.figures(trainer, task).items()}
            for logger in trainer.loggers:
                logger.log_metrics(figures, trainer.global_step - 1)
            self.restart()

    def add(self, task: Task, batch: Batch, outputs: STEP_OUTPUT) -> None:
        """Adds a training batch of this process to the counts.

        Args:
            outputs: Outputs of the training step, with the count of the first loss term.
        """
        if self._paused:  # excludes the validation, up to the request for this batch
            self._since += self.loader.requested_at - self._paused
            self._paused = 0.0
        self._counted = self._counted + cast(dict[str, Tensor], outputs)["count"]
        work = task.work(batch)
        self._images, self._tokens = self._images + work.images, self._tokens or work.rows > 0
        if self.flop is not None:
            self._flop += self.flop.training(work, 0)

    def figures(self, trainer: L.Trainer, task: Task) -> dict[str, float]:
        """Returns the metrics since the last restart. All ranks must call it together."""
        elapsed = time.perf_counter() - self._since - (compiling.seconds() - self._compiled)
        counted = float(self._counted)
        flop = self._flop + (0.0 if self.flop is None else 3 * self.flop.head * counted)
        waited = self.loader.waited - self._waited
        counts = torch.tensor([self._images, counted, flop, waited], dtype=torch.float64)
        counts = counts.to(task.device) if trainer.world_size > 1 else counts
        images, tokens, flop, waited = sum_over_ranks(counts, trainer).tolist()
        peak = peak_flop(trainer, task.device)
        values = {
            "images_per_s": images / elapsed if self._images else None,
            f"{task.counted_unit}_per_s": tokens / elapsed if self._tokens else None,
            "data_wait": waited / trainer.world_size / elapsed,
            "flop_per_s": flop / elapsed if self.flop is not None else None,
            "mfu": flop / elapsed / peak / trainer.world_size if self.flop is not None and peak else None,
            "peak_memory_gib": peak_memory(task.device) / 2**30,
        }
        return {name: float(f"{value:.5g}") for name, value in values.items() if value is not None}


def peak_flop(trainer: L.Trainer, device: torch.device) -> float | None:
    """Returns the peak FLOP/s of a device in the trainer's precision; None if PEAKS does not have the device."""
    if device.type != "cuda" or (peaks := PEAKS.get(torch.cuda.get_device_name(device))) is None:
        return None
    half, tf32, single = peaks
    if "16" in str(trainer.precision):
        return half
    return single if torch.get_float32_matmul_precision() == "highest" else tf32


def peak_memory(device: torch.device) -> int:
    """Returns the peak memory in bytes: of torch's tensors on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would start from the peak of the parent process
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class StepTimes(Throughput):
    """Measures the time of single optimiser steps without logging.

    A step ends when the device has finished it. On a GPU, which runs asynchronously, CUDA events are timed.

    Attributes:
        result: The metrics; empty until all steps are timed.
    Args:
        warm_up: Number of optimiser steps before the timed ones.
        steps: Number of timed steps.
    """

    def __init__(self, *, warm_up: int, steps: int) -> None:
        super().__init__()
        self.warm_up, self.steps = warm_up, steps
        self.result: dict[str, float] = {}
        self._ends: list[Timestamp] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        task = cast(Task, pl_module)
        self.add(task, batch, outputs)
        if is_mid_step(trainer) or trainer.global_step < self.warm_up:
            return
        if trainer.global_step == self.warm_up:
            synchronize(task.device)
            self.restart()
        self._ends.append(record_time(task.device))
        if len(self._ends) > self.steps:
            synchronize(task.device)
            times = [measure_ms(start, end) for start, end in pairwise(self._ends)]
            tenths = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
            quantiles = {"step_ms": statistics.median(times), "step_ms_p10": tenths[0], "step_ms_p90": tenths[8]}
            self.result = {**quantiles, **self.figures(trainer, task)}


def record_time(device: torch.device) -> Timestamp:
    """Records a timestamp of a device: a CUDA event, or the time on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def measure_ms(start: Timestamp, end: Timestamp) -> float:
    """Returns the milliseconds between two timestamps that have been reached."""
    if isinstance(start, float) or isinstance(end, float):
        return 1e3 * (cast(float, end) - cast(float, start))
    return start.elapsed_time(end)


def synchronize(device: torch.device) -> None:
    """Waits until a GPU has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
