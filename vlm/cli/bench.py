"""`vlm bench`: measures the speed of training a config, or finds the largest batch that fits."""

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from vlm.errors import UserError
from vlm.inference.options import Option, Overrides
from vlm.training.step.step_loader import StepLoader

WARM_UP = 5  # minimum of untimed steps, in which memory is allocated and queues of batches settle


def bench(
    overrides: Overrides = None,
    steps: Annotated[int, Option("Optimiser steps that are timed.", least=1)] = 20,
    form: Annotated[str, Option("text or json.", ("--format",), choices=("text", "json"))] = "text",
    find_batch: Annotated[
        bool, Option("The largest data.batch_size that fits, by trying on a GPU.", ("--find-batch",))
    ] = False,
) -> int:
    """Times training steps of a config, or finds its largest batch; returns the exit status."""
    from vlm.config.compose import compose
    from vlm.training.config.check import check

    config = compose(overrides or [], check)
    from vlm.training.run.faults import explain
    from vlm.training.run.train import quiet

    quiet()
    try:
        with redirect_stdout(sys.stderr):  # only the figures go to stdout
            figures = largest_batch(config) if find_batch else measure(config, steps=steps)
    except Exception as fault:
        explained = explain(fault, None)
        raise explained from (None if explained is fault else fault)
    if figures:
        print(json.dumps(figures, indent=1) if form == "json" else text(figures), flush=True)
    return 0


def measure(config: dict[str, Any], *, steps: int) -> dict[str, Any]:
    """Trains for some steps and returns their figures; returns an empty dict in all processes but the first.

    Args:
        config: The resolved config.
        steps: Optimiser steps that are timed.
    """
    from vlm.data.workers import default_workers
    from vlm.training.callbacks.speed import StepTimes

    workers = config["data"]["num_workers"]
    ahead = 2 * (
        default_workers() if workers == "auto" else int(workers)
    )  # batches that wait when the first step begins
    times = StepTimes(warm_up=max(WARM_UP, ahead), steps=steps)
    with trained(config, times, steps=times.warm_up + steps) as run:
        run.fit()
        if not run.trainer.is_global_zero:
            return {}
        parameters = sum(p.numel() for p in run.task.model.parameters())
        return {
            "model": type(run.task.model).__name__.removeprefix("FSDP"),
            "parameters": parameters,
            "device": device_name(run.task.device),
            "devices": run.trainer.world_size,
            "precision": str(run.trainer.precision),
            "batch_size": config["data"]["batch_size"],
            "accumulate_grad_batches": run.trainer.accumulate_grad_batches,
            "steps": steps,
            "warm_up": times.warm_up,
            **times.result,
        }


def device_name(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"


def text(figures: dict[str, Any]) -> str:
    """Returns figures as a table, one per line."""
    if "largest_batch_size" in figures:
        return f"largest batch  data.batch_size={figures['largest_batch_size']}  ({figures['how']})"
    batch = f"{figures['batch_size']} over {figures['devices']} x {figures['device']}, {figures['precision']}"
    more = f", {figures['accumulate_grad_batches']} batches a step" if figures["accumulate_grad_batches"] > 1 else ""
    step = f"{figures['step_ms']:.1f} ms, p10 {figures['step_ms_p10']:.1f}, p90 {figures['step_ms_p90']:.1f}"
    lines = {
        "model": f"{figures['model']}, {figures['parameters']:,} parameters",
        "batch": batch + more,
        "step": f"{step}  (median of {figures['steps']}, after {figures['warm_up']})",
    }
    for unit in ("images", "tokens", "texts", "words"):
        lines |= {f"{unit}/s": f"{figures[name]:,.1f}"} if (name := f"{unit}_per_s") in figures else {}
    lines["data wait"] = f"{figures['data_wait']:.1%} of the time"
    if "flop_per_s" in figures:
        share = f", {figures['mfu']:.1%} of the peak (MFU)" if "mfu" in figures else ""
        lines["FLOP/s"] = f"{figures['flop_per_s']:.3g}{share}"
    lines["memory"] = f"{figures['peak_memory_gib']:.2f} GiB at most"
    return "\n".join(f"{name:<12}{value}" for name, value in lines.items())


STEPS = 2  # the first creates the optimiser's moments; the second reaches the memory's peak
USABLE = 0.9  # share of the free memory that an estimate may use
# Callbacks that take no part in a step: they print, evaluate or save.
LEFT_OUT = ("progress", "pace", "audit", "samples", "grounding", "checkpoints", "signals", "throughput")


@contextmanager
def trained(config: dict[str, Any], callback: Any, *, steps: int) -> Iterator[Any]:
    """Context with a run of a config that trains for some steps, in a temporary folder.

    Args:
        callback: Takes part in the training.
        steps: Number of optimiser steps.
    """
    from vlm.training.callbacks.signals import Stopped, stopping
    from vlm.training.run import run_folder
    from vlm.training.run.processes import broadcast_choice
    from vlm.training.run.run import Run

    trainer = {"max_epochs": -1, "max_steps": steps, "max_time": None, "limit_val_batches": 0}
    callbacks = {name: node for name, node in config["callbacks"].items() if name not in LEFT_OUT}
    logger = {"csv": config["logger"].get("csv")}
    config = {**config, "trainer": {**config["trainer"], **trainer}, "callbacks": callbacks, "logger": logger}
    with tempfile.TemporaryDirectory(prefix="vlm-bench-") as scratch:
        folder = Path(broadcast_choice(lambda: scratch)) / "run"
        try:
            with stopping():
                run = Run(config, folder=folder)
                run.trainer.callbacks.append(callback)  # type: ignore[attr-defined]
                yield run
        except Stopped as stop:
            raise UserError(str(stop), stop.status) from stop
        finally:
            run_folder.leave()


class Peak(L.Callback):
    """Measures the peak memory of this process during training on a CPU, in `bytes`."""

    bytes = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.bytes = 0
        if pl_module.device.type == "cpu":
            try:
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far: see proc(5)
            except OSError as fault:
                raise UserError(f"--find-batch: this system does not tell peaks of memory ({fault})") from fault

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cpu":
            self.bytes = kilobytes("/proc/self/status", "VmHWM")


def largest_batch(config: dict[str, Any]) -> dict[str, Any]:
    """Finds the largest `data.batch_size` that training has memory for; trials start at the config's.

    Trials train on the epoch's heaviest batch: the one with the most tokens after padding.

    Raises:
        UserError: Several devices train, one image does not fit, or the system does not report its memory.
    """
    devices, start = config["trainer"]["devices"], config["data"]["batch_size"]
    if devices not in (1, "1") and not (isinstance(devices, list) and len(devices) == 1):
        raise UserError(
            "--find-batch: tries one device; give trainer.devices=1 here, and N times the size for N devices"
        )
    unit = config["data"].get("repeats") or 1  # which divides every size
    first = Trial(config, unit)
    if first.device == "cuda":
        if not first.fits:
            raise UserError(f"--find-batch: not even a batch of {unit} fits; choose a smaller model")
        start, limit = max(1, start // unit), max(1, first.samples // unit)
        size = unit * largest(lambda count: Trial(config, unit * count).fits, start=start, limit=limit)
        how = "tried, to within a sixteenth" if size < first.samples else "tried; all samples there are"
        return {"largest_batch_size": size, "estimate": False, "how": how}
    large = max(1, min(start, first.samples) // unit) * unit
    small = max(1, large // 4 // unit) * unit
    if small == large:
        raise UserError(f"data.batch_size: {start} is too small to see memory grow; give 8, or more samples")
    low, high = Trial(config, small), Trial(config, large)
    growth = (high.peak - low.peak) / (large - small)
    if growth <= 0:
        raise UserError(f"data.batch_size: from {small} to {large}, memory does not grow; give a larger one to go by")
    room = available_memory() * USABLE + kilobytes("/proc/self/status", "VmRSS")
    size = min(first.samples, large + int((room - high.peak) / growth)) // unit * unit
    per = f"{growth / 2**20:.3g} MiB a sample from {small} to {large}, {USABLE:.0%} of the free memory"
    return {"largest_batch_size": size, "estimate": True, "how": f"an estimate: {per}"}


class Trial:
    """A trial of training at a batch size: whether it fits, and its memory.

    Args:
        config: The resolved config.
        size: The batch size.
    """

    def __init__(self, config: dict[str, Any], size: int) -> None:
        self.size, self.fits, self.peak, self.samples, self.device = size, True, 0, 0, ""
        try:
            self._train({**config, "data": {**config["data"], "batch_size": size}})
        except torch.OutOfMemoryError:
            self.fits = False
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _train(self, config: dict[str, Any]) -> None:
        peak = Peak()
        with trained(config, peak, steps=STEPS) as run:
            self.device = run.trainer.strategy.root_device.type
            self.samples = len(run.data.samples("train", training=True))
            loader = run.data.train_dataloader
            run.data.train_dataloader = lambda: heaviest(loader(), STEPS * run.trainer.accumulate_grad_batches)
            run.fit()
        self.peak = peak.bytes


def heaviest(loader: DataLoader, batches: int) -> DataLoader:
    """Returns a loader that repeats the heaviest batch of a loader's first epoch."""
    order: Any = loader.batch_sampler
    lengths = order.lengths(0)
    of_epoch = (order.keys(0, places) for places in order.global_batches(0))
    keys = max(of_epoch, key=lambda batch: len(batch) * max(lengths[key.index] for key in batch))
    again: Any = [keys] * batches
    kind = partial(StepLoader, loader.trainer) if isinstance(loader, StepLoader) else DataLoader
    return kind(loader.dataset, batch_sampler=again, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory)


def largest(fits: Callable[[int], bool], *, start: int, limit: int) -> int:
    """Returns the largest size that fits, to within a sixteenth, by doubling and then bisecting; 1 is known to fit.

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
    """Returns the bytes that this process may still take without paging, within its control group's limit."""
    free = kilobytes("/proc/meminfo", "MemAvailable")
    try:
        group = Path("/sys/fs/cgroup")
        own = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no group, or one without a limit
        return free
    return min(free, own)


def kilobytes(path: str, name: str) -> int:
    """Returns a figure of the kernel, converted from kilobytes to bytes.

    Raises:
        UserError: The system does not report it.
    """
    try:
        lines = Path(path).read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))
    except (OSError, StopIteration) as fault:
        raise UserError(f"--find-batch: on a CPU it needs Linux, which tells {name} in {path}") from fault
