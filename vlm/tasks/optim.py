"""Optimiser groups and learning-rate schedules."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer


class Schedule(Protocol):
    """A learning-rate schedule: the rate of an optimiser step, counted from 0, over the highest."""

    def factor(self, step: int, total: int) -> float: ...


@dataclass
class Optimization:
    """How a model is trained.

    Args:
        optimizer: Makes the optimiser from parameter groups.
        schedule: Learning rate over time.
        weight_decay: Decay of the matrices.
    """

    optimizer: Callable[[list[dict[str, Any]]], Optimizer]
    schedule: Schedule
    weight_decay: float

    def optimizer_for(self, model: nn.Module) -> Optimizer:
        return self.optimizer(decay_groups(model, self.weight_decay))


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameter groups for AdamW: only matrices of linear and convolution layers decay.

    Biases, norms, embeddings and positions do not (as in GPT-2 and timm): shrinking them fits nothing better.
    """
    decayed = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if id(p) in decayed], "weight_decay": weight_decay},
        {"params": [p for p in trainable if id(p) not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class Cosine:
    """Linear warm-up, then half a cosine down to a floor (Loshchilov and Hutter 2017).

    Args:
        warmup: Share of all steps that warms up, if below 1; else a number of steps.
        floor: Last learning rate over the highest.
    """

    def __init__(self, *, warmup: float = 0.05, floor: float = 0.0) -> None:
        self.warmup = warmup
        self.floor = floor

    def factor(self, step: int, total: int) -> float:
        warmup = self.warmup * total if self.warmup < 1 else self.warmup
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1.0, total - warmup))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


class Constant:
    """Linear warm-up, then a constant learning rate.

    Args:
        warmup: Share of all steps that warms up, if below 1; else a number of steps.
    """

    def __init__(self, *, warmup: float = 0.0) -> None:
        self.warmup = warmup

    def factor(self, step: int, total: int) -> float:
        warmup = self.warmup * total if self.warmup < 1 else self.warmup
        return min(1.0, (step + 1) / (warmup + 1))
