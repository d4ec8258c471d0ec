"""Helpers for the GPU scripts: the check for a device, timing, and writing results."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def require_gpu() -> None:
    """Exits with a message if there is no GPU."""
    if not torch.cuda.is_available():
        print(f"{sys.argv[0]}: needs a CUDA device, and torch {torch.__version__} sees none", file=sys.stderr)
        sys.exit(2)


def milliseconds(work: Callable[[], object], *, runs: int = 10, warm_up: int = 3) -> float:
    """Returns the mean time of a call on the GPU.

    Args:
        work: A function without arguments.
    """
    for _ in range(warm_up):
        work()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(runs):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / runs


def keep(figures: dict[str, Any], out: str | None) -> None:
    """Writes figures as JSON, if a path is given."""
    if out is not None:
        Path(out).write_text(json.dumps(figures, indent=1) + "\n")
