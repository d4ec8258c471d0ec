"""`vlm bench`: measures the speed of training a config, or finds the largest batch that fits."""

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated, Any

from vlm.config.tree import Config
from vlm.inference.options import Adapters, Option, Overrides

WARM_UP = 5  # minimum number of untimed steps, in which memory is allocated and prefetch queues fill


def bench(
    overrides: Overrides = None,
    steps: Annotated[int, Option("Number of optimizer steps to time.", least=1)] = 20,
    form: Annotated[str, Option("text or json.", ("--format",), choices=("text", "json"))] = "text",
    find_batch: Annotated[
        bool, Option("Find the largest data.batch_size that fits in memory; estimated on a CPU.", ("--find-batch",))
    ] = False,
    adapters: Adapters = None,
) -> int:
    """Times training steps of a config, or finds its largest batch; returns the exit status."""
    from vlm.config.compose import compose
    from vlm.training.config.check import check

    given = [] if adapters is None else [f"model.adapters={adapters}"]
    config = compose([*(overrides or []), *given], check)
    from vlm.cli.batch_size import find_largest_batch
    from vlm.training.run.faults import explain_error
    from vlm.training.run.train import silence_libraries

    silence_libraries()
    try:
        with redirect_stdout(sys.stderr):  # only the results go to stdout
            figures = find_largest_batch(config) if find_batch else measure_speed(config, steps=steps)
    except Exception as fault:
        explained = explain_error(fault, None)
        raise explained from (None if explained is fault else fault)
    if figures:
        print(json.dumps(figures, indent=1) if form == "json" else format_figures(figures), flush=True)
    return 0


def measure_speed(config: Config, *, steps: int) -> dict[str, Any]:
    """Trains for some steps and returns the measurements; returns an empty dict in all processes but the first.

    Args:
        config: The resolved config.
        steps: Number of optimizer steps to time.
    """
    import torch

    from vlm.cli.batch_size import temporary_run
    from vlm.data.workers import default_workers
    from vlm.training.callbacks.speed import StepTimes

    workers = config["data"]["num_workers"]
    workers = default_workers() if workers == "auto" else int(workers)
    ahead = 2 * workers  # number of batches that are prefetched when the first step begins
    times = StepTimes(warm_up=max(WARM_UP, ahead), steps=steps)
    with temporary_run(config, times, steps=times.warm_up + steps) as run:
        run.fit()
        if not run.trainer.is_global_zero:
            return {}
        parameters = sum(p.numel() for p in run.task.model.parameters())
        device, threads = run.task.device, torch.get_num_threads()
        device_name = (
            torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {threads} threads"
        )
        return {
            "model": type(run.task.model).__name__.removeprefix("FSDP"),
            "parameters": parameters,
            "device": device_name,
            "devices": run.trainer.world_size,
            "precision": str(run.trainer.precision),
            "batch_size": config["data"]["batch_size"],
            "accumulate_grad_batches": run.trainer.accumulate_grad_batches,
            "steps": steps,
            "warm_up": times.warm_up,
            **times.result,
        }


def format_figures(figures: dict[str, Any]) -> str:
    """Returns measurements as a table, one per line."""
    if "largest_batch_size" in figures:
        return f"largest batch  data.batch_size={figures['largest_batch_size']}  ({figures['how']})"
    batch = f"{figures['batch_size']} over {figures['devices']} x {figures['device']}, {figures['precision']}"
    more = f", {figures['accumulate_grad_batches']} batches per step" if figures["accumulate_grad_batches"] > 1 else ""
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
