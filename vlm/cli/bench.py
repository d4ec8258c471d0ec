"""`vlm bench`: measures the speed of training a config, and keeps nothing of the training."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlm.errors import UserError

WARM_UP = 5  # minimum of untimed steps, in which memory is allocated and queues of batches settle
# Callbacks that take no part in a step: they print, evaluate or save.
LEFT_OUT = ("progress", "pace", "audit", "samples", "grounding", "checkpoints", "signals", "throughput")


def measure(config: dict[str, Any], *, steps: int) -> dict[str, Any]:
    """Trains for some steps and returns their figures; returns an empty dict in all processes but the first.

    Args:
        config: The resolved config.
        steps: Optimiser steps that are timed.
    """
    from vlm.data.workers import default_workers
    from vlm.training.callbacks.step_times import StepTimes

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
