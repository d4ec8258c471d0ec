"""`vlm bench`: measures the speed of training a config, and keeps nothing of the training."""

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated, Any

from vlm.inference.options import Option, Overrides

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
    from vlm.cli.batch_size import largest_batch
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
    from vlm.cli.batch_size import trained
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
