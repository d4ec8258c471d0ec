"""Captions of a validation beside their references."""

import json
from pathlib import Path
from typing import Any, cast

import lightning as L

from vlm.inference.files import printable
from vlm.tasks.captioning import Captioning


class Samples(L.Callback):
    """Prints a few captions of each validation with a reference, and keeps more in samples/.

    Args:
        show: How many are printed.
        keep: How many are written to samples/step_N.jsonl.
    """

    def __init__(self, *, show: int, keep: int) -> None:
        self.show, self.keep = show, keep

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        task = cast(Captioning, pl_module)
        samples = task.samples
        if trainer.sanity_checking or not trainer.is_global_zero or not samples:
            return
        lines = [_line(sample) for sample in samples[: self.show]]
        scores = "  ".join(f"{name.removeprefix('val/')} {value:.4f}" for name, value in task.results.items())
        print("\n".join([f"\nstep {trainer.global_step}: {scores}", *lines]), flush=True)
        folder = Path(trainer.default_root_dir) / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        kept = [{name: value for name, value in sample.items() if name != "image"} for sample in samples[: self.keep]]
        text = "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in kept)
        (folder / f"step_{trainer.global_step}.jsonl").write_text(text, encoding="utf-8")


def _line(sample: dict[str, Any]) -> str:
    """One line of output; control characters in a caption stay visible and harmless."""
    reference = sample["references"][0] if sample["references"] else ""
    mark = "=" if sample["caption"] in sample["references"] else " "
    return f"  {mark} {printable(sample['caption'])!r:60} reference: {printable(reference)!r}"
