"""What the journeys' tests compare."""

from pathlib import Path

import torch

from vlm import checkpoint as ckpt


def only_run(runs: Path) -> Path:
    (folder,) = runs.glob("*/20*")
    return folder


def same_weights(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold bitwise the same weights, optimiser state and step."""
    a, b = ckpt.read(one), ckpt.read(other)
    weights = all(torch.equal(a["state_dict"][name], b["state_dict"][name]) for name in a["state_dict"])
    moments = [
        torch.equal(x[name], y[name])
        for x, y in zip(
            a["optimizer_states"][0]["state"].values(), b["optimizer_states"][0]["state"].values(), strict=True
        )
        for name in x
    ]
    return weights and all(moments) and a["global_step"] == b["global_step"]
