"""What the journeys' tests compare."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from compare import unlike
from PIL import Image

from vlm.checkpoint import load as ckpt
from vlm.randomness import numpy_rng
from vlm.training.callbacks.progress import ShowFirstBatch


def only_run(runs: Path) -> Path:
    (folder,) = runs.glob("*/20*")
    return folder


def best(run: Path) -> str:
    return str(run / "checkpoints" / "best.ckpt")


def results(folder: Path, name: str = "metrics") -> dict | list:
    return json.loads((folder / f"{name}.json").read_text())


def draw_classes(root: Path, colors: dict[str, tuple[int, int, int]], *, count: int) -> None:
    """Draws so many noisy pictures of each colour into the folder that names it."""
    for name, color in colors.items():
        (root / name).mkdir(parents=True)
        for index in range(count):
            noise = numpy_rng("picture", name, index).integers(-20, 21, (40, 48, 3))
            pixels = np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.png")


def same_weights(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold bitwise the same weights, optimiser state and step."""
    a, b = ckpt.read(one), ckpt.read(other)
    parts = ("state_dict", "optimizer_states", "global_step")
    return not any(unlike(a[part], b[part], part) for part in parts)


def interrupt_at(step: int, signum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends this process a signal in the middle of an optimiser step."""
    sent: list[int] = []

    def send(audit, trainer, *args) -> None:
        if trainer.global_step == step and not sent:
            sent.append(signum)
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(ShowFirstBatch, "on_train_batch_start", send)
