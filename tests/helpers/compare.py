"""Whether a run that was interrupted ended as one that was not."""

import csv
import json
from pathlib import Path
from typing import Any

import torch

from vlm.checkpoint import load as ckpt

KEPT = {"config.yaml", "metrics.csv", "throughput.csv", "checkpoints", "samples", "evaluation"}
STATE = ("state_dict", "ema", "optimizer_states", "lr_schedulers", "global_step", "epoch", "callbacks", "loops")


def check_same(folder: Path, whole: Path) -> None:
    """Asserts that two runs ended with bitwise the same weights, averages, moments and counters, and the same scores,
    and that nothing else lies about in their folders."""
    for name in ("last", "best"):
        one, other = (ckpt.read(run / "checkpoints" / f"{name}.ckpt") for run in (folder, whole))
        for part in STATE:
            found = unlike(one.get(part), other.get(part), f"{name}.{part}")
            assert not found, found
    assert rows(folder) == rows(whole)
    scores = [json.loads(next(run.glob("evaluation/*/metrics.json")).read_text()) for run in (folder, whole)]
    assert scores[0] == scores[1]
    assert {path.name for path in folder.iterdir()} <= KEPT
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"last.ckpt", "previous.ckpt", "best.ckpt"}


def unlike(one: Any, other: Any, at: str) -> list[str]:
    """Where two nested containers of tensors and plain values differ."""
    if type(one) is not type(other):
        return [f"{at}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{at}: {sorted(map(str, one))} and {sorted(map(str, other))}"]
        return [found for name in one for found in unlike(one[name], other[name], f"{at}.{name}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{at}: {len(one)} and {len(other)}"]
        return [found for index in range(len(one)) for found in unlike(one[index], other[index], f"{at}.{index}")]
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [f"{at}: {one} and {other}"]


def rows(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without empty cells."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
