"""Optimiser groups and learning-rate schedules."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol, runtime_checkable

import lightning as L
from torch import nn
from torch.optim import Optimizer

from vlm.errors import Range, Share, UserError


class Schedule(Protocol):
    """A learning-rate schedule: the rate at an optimiser step, counted from 0, as a share of the highest."""

    def factor(self, step: int, total: int) -> float: ...


@dataclass
class Optimization:
    """Optimiser and schedule of a training.

    Args:
        optimizer: Makes the optimiser from parameter groups.
        schedule: Learning rate over time.
        weight_decay: Decay of the matrices.
        layer_decay: Ratio of a layer's learning rate to that of the layer above.
    """

    optimizer: Callable[[list[dict[str, Any]]], Optimizer]
    schedule: Schedule
    weight_decay: float

    layer_decay: float = 1.0

    def optimizer_for(self, model: nn.Module) -> Optimizer:
        """The optimiser of a model's weights.

        Raises:
            UserError: None of them is trained.
        """
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError("task.freeze: leaves nothing to train; leave out one of the parts")
        return self.optimizer(parameter_groups(model, self.weight_decay, self.layer_decay))

    def factors(self, optimizer: Optimizer, total: int) -> list[Callable[[int], float]]:
        """Returns, for each parameter group, a function from a step to its learning rate as a share of the highest."""
        return [partial(self._factor, total=total, scale=group["scale"]) for group in optimizer.param_groups]

    def _factor(self, step: int, total: int, scale: float) -> float:
        return scale * self.schedule.factor(step, total)


def total_steps(trainer: L.Trainer) -> int | None:
    """Optimiser steps of the whole run; None for one without an end.

    The trainer's own estimate would create the training loader before a resumed run knows its position.
    """
    batches = trainer.datamodule.train_batches()  # type: ignore[attr-defined]
    limit = trainer.limit_train_batches
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    epochs = trainer.max_epochs or -1
    steps = -(-batches // trainer.accumulate_grad_batches) * epochs if epochs > 0 else -1
    return min((count for count in (steps, trainer.max_steps) if count > 0), default=None)


def parameter_groups(model: nn.Module, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
    """Parameter groups: only matrices of linear and convolution layers decay, and lower layers learn more slowly.

    Biases, norms, embeddings and positions do not decay (as in GPT-2 and timm): shrinking them does not help. A layer
    with one output has a vector, not a matrix, because Muon's steps would be too short for the scores of soft
    attention.

    Args:
        layer_decay: Ratio of a layer's learning rate to that of the layer above (Clark et al. 2020, appendix A); 1 is
            off.
    Returns:
        Groups with "matrices", True if they hold matrices, and "scale", a factor of their learning rate.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    matrices = {id(layer.weight) for layer in layers if len(layer.weight) > 1}
    depths = layer_depths(model)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale = layer_decay ** depths[name]
            groups.setdefault((id(parameter) in matrices, scale), []).append(parameter)
    return [
        {"params": params, "weight_decay": weight_decay if decays else 0.0, "matrices": decays, "scale": scale}
        for (decays, scale), params in sorted(groups.items(), key=lambda item: (not item[0][0], -item[0][1]))
    ]


# Modules below the first block of a stack.
_BOTTOM = ("patch_embed", "positions", "class_token", "token_embed")


@runtime_checkable
class Layered(Protocol):
    """A module that counts its layers itself."""

    def layer_depths(self) -> dict[str, int]:
        """Returns the number of layers above each parameter, by name; 0 for heads and last norms."""


def layer_depths(model: nn.Module) -> dict[str, int]:
    """Number of layers above each parameter in its stack: 0 for heads and last norms, 1 for the last block."""
    depths: dict[str, int] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Layered):
            depths |= {f"{prefix}.{name}".removeprefix("."): depth for name, depth in module.layer_depths().items()}
    names = [name for name, _ in model.named_parameters() if name not in depths]
    matches = {name: re.match(r"(.*?)(?:blocks|layers|stages)\.(\d+)\.", name) for name in names}
    counts: dict[str, int] = {}
    for match in matches.values():
        if match:
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    for name, match in matches.items():
        stack = match[1] if match else max((s for s in counts if name.startswith(s)), key=len, default="")
        below = name.removeprefix(stack).startswith(_BOTTOM) and stack in counts
        depths[name] = counts[stack] - int(match[2]) if match else (counts[stack] + 1 if below else 0)
    return depths


class Cosine:
    """Linear warm-up, then half a cosine down to a floor (Loshchilov and Hutter 2017).

    Args:
        warmup: Share of all steps that warms up, if below 1; else a number of steps.
        floor: Last learning rate as a share of the highest.
    """

    def __init__(self, *, warmup: Annotated[float, Range(0)] = 0.05, floor: Share = 0.0) -> None:
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

    def __init__(self, *, warmup: Annotated[float, Range(0)] = 0.0) -> None:
        self.warmup = warmup

    def factor(self, step: int, total: int) -> float:
        warmup = self.warmup * total if self.warmup < 1 else self.warmup
        return min(1.0, (step + 1) / (warmup + 1))
