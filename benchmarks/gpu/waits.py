"""Lists the lines at which a training step waits for the device, as torch reports them.

    python benchmarks/gpu/waits.py --text FILE

Four steps of each task are watched, after four that are not. Each line is printed with its number of waits per step.
"""

import argparse
import traceback
import warnings
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import torch
from device import require_gpu

from vlm.config.compose import compose
from vlm.training.run.run import Run
from vlm.training.run.train import silence_libraries

FIRST, STEPS = 4, 4
TASKS = {
    "captioning": ["data=shapes", "data.batch_size=16", "callbacks=ema"],
    "classification": ["data=shapes_classes", "model=classifier_tiny", "data.batch_size=16", "task.mixup=0.8"],
    "language_modeling": ["data=text", "model=lm_tiny", "tokenizer=char", "optim=muon"],
}


class Watch(L.Callback):
    """Counts the waits of some steps by source line."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        watched = FIRST <= batch_idx < FIRST + STEPS
        torch.cuda.set_sync_debug_mode("warn" if watched else "default")

    def note(self, message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        """Counts a warning of torch about a wait; replaces warnings.showwarning."""
        if "synchroniz" in str(message):
            frames = [f for f in traceback.extract_stack() if "/vlm/" in f.filename or "lightning" in f.filename]
            self.waits[" <- ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-3:]))] += 1


def watch(task: str, overrides: list[str]) -> None:
    seen = Watch()
    more = ["trainer=gpu", "compile=false", "trainer.limit_val_batches=0", f"trainer.max_steps={FIRST + STEPS + 1}"]
    with TemporaryDirectory() as runs, warnings.catch_warnings():
        run = Run(compose([f"task={task}", *overrides, f"runs={runs}", *more]))
        run.trainer.callbacks.append(seen)  # type: ignore[attr-defined]
        warnings.resetwarnings()
        warnings.simplefilter("always")
        warnings.showwarning = seen.note  # type: ignore[assignment]
        run.fit()
    torch.cuda.set_sync_debug_mode("default")
    print(task)
    for line, count in seen.waits.most_common():
        print(f"   {count / STEPS:.2f} a step  {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="A file of text, such as Shakespeare's plays.")
    args = parser.parse_args()
    require_gpu()
    silence_libraries()
    for task, overrides in TASKS.items():
        watch(task, [*overrides, *([f"data.path={args.text}"] if task == "language_modeling" else [])])


if __name__ == "__main__":
    main()
