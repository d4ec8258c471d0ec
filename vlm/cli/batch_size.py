"""The largest batch that fits into memory, for `vlm bench --find-batch`, found by short trainings that are removed."""

import gc
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from vlm.config.tree import Config, replace
from vlm.errors import UserError
from vlm.training.data_module import StepLoader

if TYPE_CHECKING:
    from vlm.training.run.run import Run

STEPS = 2  # the first creates the optimizer state; the second reaches the peak memory
USABLE_SHARE = 0.9  # fraction of the free memory that an estimate may use
# Callbacks without part in a step: they print, evaluate or save.
EXCLUDED_CALLBACKS = ("progress", "pace", "audit", "samples", "grounding", "checkpoints", "signals", "throughput")


@contextmanager
def temporary_run(config: Config, callback: L.Callback, *, steps: int) -> Iterator["Run"]:
    """Context with a short training run in a temporary folder.

    Args:
        callback: Added to the trainer's callbacks.
        steps: Number of optimiser steps.
    """
    from vlm.training.callbacks.signals import RunInterrupted, raise_on_signal
    from vlm.training.run import run_folder
    from vlm.training.run.processes import broadcast_choice
    from vlm.training.run.run import Run

    trainer = {"max_epochs": -1, "max_steps": steps, "max_time": None, "limit_val_batches": 0}
    callbacks = {name: node for name, node in config["callbacks"].items() if name not in EXCLUDED_CALLBACKS}
    logger = {"csv": config["logger"].get("csv")}
    config = replace(config, trainer={**config["trainer"], **trainer}, callbacks=callbacks, logger=logger)
    with tempfile.TemporaryDirectory(prefix="vlm-bench-") as scratch:
        folder = Path(broadcast_choice(lambda: scratch)) / "run"
        try:
            with raise_on_signal():
                run = Run(config, folder=folder)
                run.trainer.callbacks.append(callback)  # type: ignore[attr-defined]
                yield run
        except RunInterrupted as stop:
            raise UserError(str(stop), stop.status) from stop
        finally:
            run_folder.release_runs()


class PeakMemory(L.Callback):
    """Measures the peak memory of this process during training on a CPU, in `bytes`."""

    bytes = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bytes = 0
        if pl_module.device.type == "cpu":
            try:
                Path("/proc/self/clear_refs").write_text("5")  # reset the peak: see proc(5)
            except OSError as fault:
                raise UserError(f"--find-batch: this system does not report peak memory ({fault})") from fault

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cpu":
            self.bytes = read_kernel_size("/proc/self/status", "VmHWM")


def find_largest_batch(config: Config) -> dict[str, Any]:
    """Finds the largest `data.batch_size` that fits in memory; trials start at the config's value.

    Trials train on the epoch's largest batch: the one with the most tokens after padding.

    Raises:
        UserError: The config has several devices, one image does not fit, or the system does not report its memory.
    """
    devices, start = config["trainer"]["devices"], config["data"]["batch_size"]
    if devices not in (1, "1") and not (isinstance(devices, list) and len(devices) == 1):
        raise UserError(
            "--find-batch: supports one device; set trainer.devices=1, and multiply the result by the number of devices"
        )
    unit = config["data"].get("repeats") or 1  # which divides every size
    first = Trial(config, unit)
    if first.device == "cuda":
        if not first.fits:
            raise UserError(f"--find-batch: a batch of {unit} does not fit; choose a smaller model")
        start, limit = max(1, start // unit), max(1, first.samples // unit)
        size = unit * search_largest(lambda count: Trial(config, unit * count).fits, start=start, limit=limit)
        how = "measured, to within 1/16" if size < first.samples else "measured; the number of samples"
        return {"largest_batch_size": size, "estimate": False, "how": how}
    large = max(1, min(start, first.samples) // unit) * unit
    small = max(1, large // 4 // unit) * unit
    if small == large:
        raise UserError(f"data.batch_size: {start} is too small to measure memory growth; set at least 8")
    low, high = Trial(config, small), Trial(config, large)
    growth = (high.peak - low.peak) / (large - small)
    if growth <= 0:
        raise UserError(f"data.batch_size: memory does not grow from {small} to {large}; set a larger value")
    room = available_memory() * USABLE_SHARE + read_kernel_size("/proc/self/status", "VmRSS")
    size = min(first.samples, large + int((room - high.peak) / growth)) // unit * unit
    per = f"{growth / 2**20:.3g} MiB per sample from {small} to {large}, {USABLE_SHARE:.0%} of the free memory"
    return {"largest_batch_size": size, "estimate": True, "how": f"an estimate: {per}"}


class Trial:
    """A trial of training at a batch size: whether it fits, and its memory.

    Args:
        config: The resolved config.
        size: The batch size.
    """

    def __init__(self, config: Config, size: int) -> None:
        self.size, self.fits, self.peak, self.samples, self.device = size, True, 0, 0, ""
        try:
            self._train(replace(config, data={**config["data"], "batch_size": size}))
        except torch.OutOfMemoryError:
            self.fits = False
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _train(self, config: Config) -> None:
        peak = PeakMemory()
        with temporary_run(config, peak, steps=STEPS) as run:
            self.device = run.trainer.strategy.root_device.type
            self.samples = len(run.data.samples("train", training=True))
            loader = run.data.train_dataloader
            run.data.train_dataloader = lambda: repeat_largest_batch(  # type: ignore[method-assign]
                loader(), STEPS * run.trainer.accumulate_grad_batches
            )
            run.fit()
        self.peak = peak.bytes


def repeat_largest_batch(loader: DataLoader, batches: int) -> DataLoader:
    """Returns a loader that repeats the largest batch of a loader's first epoch."""
    order: Any = loader.batch_sampler
    lengths = order.lengths(0)
    batches_of_epoch = (order.keys(0, places) for places in order.global_batches(0))
    keys = max(batches_of_epoch, key=lambda batch: len(batch) * max(lengths[key.index] for key in batch))
    repeated: Any = [keys] * batches
    kind = partial(StepLoader, loader.trainer) if isinstance(loader, StepLoader) else DataLoader
    return kind(loader.dataset, batch_sampler=repeated, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory)


def search_largest(fits: Callable[[int], bool], *, start: int, limit: int) -> int:
    """Returns the largest size that fits, to within 1/16, by doubling and then bisecting; size 1 is assumed to fit.

    Args:
        start: The size that is tried first.
        limit: The largest size to try.
    """
    low, high = 1, None
    size = min(start, limit)
    while high is None and low < limit:
        if fits(size):
            low, size = size, min(2 * size, limit)
        else:
            high = size
    while high is not None and high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def available_memory() -> int:
    """Returns the available memory in bytes, within the limit of the control group."""
    free = read_kernel_size("/proc/meminfo", "MemAvailable")
    try:
        group = Path("/sys/fs/cgroup")
        group_free = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or no limit
        return free
    return min(free, group_free)


def read_kernel_size(path: str, name: str) -> int:
    """Returns a size that the kernel reports in kilobytes, in bytes.

    Raises:
        UserError: The system does not report it.
    """
    try:
        lines = Path(path).read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))
    except (OSError, StopIteration) as fault:
        raise UserError(f"--find-batch: needs Linux on a CPU, for {name} in {path}") from fault
