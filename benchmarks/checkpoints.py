"""Measures the cost of saving and verifying checkpoints in a training with default settings.

    python benchmarks/checkpoints.py [--out FILE.json] [OVERRIDES]

Trains as `python train.py OVERRIDES` does, times every write of a checkpoint and one verified read, and prints their
share of the whole time. On a GPU, a write includes the copy from the device.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlm.machine import tune

tune()  # applies to both sides

from vlm.checkpoint import load as ckpt
from vlm.config.compose import compose
from vlm.training.run.run import Run
from vlm.training.run.train import silence_libraries


class Clock:
    """Wraps a function and adds up the time of its calls.

    Args:
        function: The function to call.
    """

    def __init__(self, function: Callable) -> None:
        self.function, self.calls, self.seconds = function, 0, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.calls += 1
            self.seconds += time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    silence_libraries()
    with tempfile.TemporaryDirectory() as runs:
        run = Run(compose([*args.overrides, f"runs={runs}"]))
        # The whole save is timed, including what the trainer gathers before it writes.
        save = Clock(run.trainer.save_checkpoint)
        run.trainer.save_checkpoint = save  # type: ignore[method-assign]
        read = Clock(ckpt.read)
        start = time.perf_counter()
        run.fit()
        training = time.perf_counter() - start
        read(run.checkpoints.last)
    row = {
        "training_s": training,
        "saves": save.calls,
        "save_s": save.seconds,
        "verified_read_s": read.seconds,
        "share": (save.seconds + read.seconds) / training,
    }
    print("".join(f"{name:>18}" for name in row))
    print("".join(f"{value:>18.4f}" for value in row.values()))
    if args.out is not None:
        Path(args.out).write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
