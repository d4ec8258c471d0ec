"""What the model made of a few inputs of each validation."""

import json
from pathlib import Path
from typing import cast

import lightning as L

from vlm.callbacks.writing import write_text
from vlm.tasks.base import Task


class Samples(L.Callback):
    """Prints a few samples of each validation, and keeps more in samples/.

    Args:
        show: How many are printed.
        keep: How many are written to samples/step_N.jsonl.
    """

    def __init__(self, *, show: int, keep: int) -> None:
        self.show, self.keep = show, keep

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        task = cast(Task, pl_module)
        samples = task.samples
        if trainer.sanity_checking or not trainer.is_global_zero or not samples:
            return
        lines = [f"  {sample['line']}" for sample in samples[: self.show]]
        scores = "  ".join(f"{name.removeprefix('val/')} {value:.4f}" for name, value in task.results.items())
        print("\n".join([f"\nstep {trainer.global_step}: {scores}", *lines]), flush=True)
        folder = Path(trainer.default_root_dir) / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        kept = [
            {name: value for name, value in sample.items() if name not in ("image", "line")}
            for sample in samples[: self.keep]
        ]
        text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in kept)
        write_text(folder / f"step_{trainer.global_step}.jsonl", text)
