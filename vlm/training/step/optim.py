"""Optimiser groups, learning-rate schedules, and the optimiser Muon."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Protocol, TypeAlias, runtime_checkable

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vlm.errors import Count, Injected, Range, Rate, Share, UserError
from vlm.nn.device import has_bfloat16

# Coefficients of the quintic that, iterated, drives every singular value towards 1 (Jordan et al. 2024). It is steep at
# zero, and leaves values between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Last iterations that tolerate products in bfloat16: earlier ones would amplify its rounding.
LOW_ITERATIONS = 2
# Matrices that are at least this many times as wide as high are iterated through their Gram matrices.
GRAM_RATIO = 1.5
ParameterGroup: TypeAlias = dict[str, Any]  # parameters and their options, as torch's optimisers take them


class Muon(Optimizer):
    """Orthogonalised momentum for matrices, AdamW for all else (Jordan et al. 2024; scaled as by Liu et al. 2025).

    An update of a matrix has the root mean square of an AdamW step, so that one learning rate serves both.

    Args:
        params: Groups; those with "matrices" hold the weights of linear and convolution layers.
        lr: Learning rate.
        momentum: Share of the momentum that is kept at each step, in Nesterov's form.
        betas, eps: AdamW's, for all other parameters.
        weight_decay: Decoupled decay, relative to lr.
        iterations: Newton-Schulz iterations.
        bfloat16: Whether all their products are in bfloat16, as in Jordan et al., if the device is faster in it. The
            iterations amplify its rounding: in a gradient of low rank, the contribution of rare samples is lost.
            Otherwise only products of the last two iterations are, which changes an update by 1 to 2%.
    """

    def __init__(
        self,
        params: Injected[Iterable[Any]],
        *,
        lr: Annotated[float, Range(0)] = 2e-3,
        momentum: Rate = 0.95,
        betas: tuple[Rate, Rate] = (0.9, 0.98),
        eps: Annotated[float, Range(0)] = 1e-8,
        weight_decay: Annotated[float, Range(0)] = 0.0,
        iterations: Count = 5,
        bfloat16: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "iterations": iterations, "matrices": False})
        self.bfloat16 = bfloat16

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                (self._step_matrices if group["matrices"] else self._step_adamw)(params, group)
        return loss

    def _step_matrices(self, params: list[Tensor], group: ParameterGroup) -> None:
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        gradients = [p.grad for p in params if p.grad is not None]
        momenta = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        low = torch.bfloat16 if has_bfloat16(params[0].device) else None
        shapes: dict[torch.Size, list[int]] = {}
        for place, p in enumerate(params):
            shapes.setdefault(p.shape, []).append(place)
        for shape, places in shapes.items():  # matrices of one shape share their products
            updates = torch.empty(len(places), *shape, dtype=params[0].dtype, device=params[0].device)
            for place, update in zip(places, updates, strict=True):
                torch.lerp(gradients[place], momenta[place], group["momentum"], out=update)
            matrices = updates.flatten(2)  # (count, rows, columns)
            orthogonal = orthogonalize(matrices, group["iterations"], low if self.bfloat16 else None, low)
            scale = 0.2 * max(orthogonal.shape[1:]) ** 0.5
            for place, update in zip(places, orthogonal, strict=True):
                params[place].add_(update.view(shape), alpha=-group["lr"] * scale)

    def _step_adamw(self, params: list[Tensor], group: ParameterGroup) -> None:
        for p in params:
            state = self.state[p]
            if not state:
                state.update(step=0, mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["step"] += 1
            first, second = group["betas"]
            state["mean"].lerp_(p.grad, 1 - first)
            state["square"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
            root = (state["square"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
            p.addcdiv_(state["mean"], root, value=-group["lr"] / (1 - first ** state["step"]))


def orthogonalize(
    matrices: Tensor, iterations: int, products: torch.dtype | None = None, last: torch.dtype | None = None
) -> Tensor:
    """Returns approximately the nearest matrices with orthonormal rows or columns: U V' of the SVD U S V'.

    Args:
        products: dtype of all products; None for that of the matrices.
        last: dtype of products of the last iterations, where rounding is no longer amplified; None for `products`.
    Shapes:
        matrices (count, rows, columns) -> the same
    """
    a, b, c = COEFFICIENTS
    rows, columns = matrices.shape[1:]
    tall = rows > columns
    dtype = products or matrices.dtype
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if exact and max(rows, columns) >= GRAM_RATIO * min(rows, columns):
        if tall:
            return matrices @ _compute_factor(matrices.mT @ matrices, iterations, last).mT
        return _compute_factor(matrices @ matrices.mT, iterations, last) @ matrices
    x = matrices.mT if tall else matrices
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12)).to(dtype)
    for iteration in range(iterations):
        if last is not None and iteration == iterations - LOW_ITERATIONS:
            x = x.to(last)
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


def _compute_factor(gram: Tensor, iterations: int, last: torch.dtype | None) -> Tensor:
    """Returns the product of the polynomials by which the iterations multiply a matrix X from the left.

    An iteration takes four products of small squares, instead of two products with the wide X and one of squares. The
    factor stays in float32, since zero singular values are amplified most (3.4445 ** iterations). Rounded polynomials
    do not commute, so from the right the factor is multiplied transposed.

    Args:
        gram: X X', whose traces are the squared norms of X.
    Shapes:
        gram (count, size, size) -> the same
    """
    a, b, c = COEFFICIENTS
    dtype = gram.dtype
    square = gram.diagonal(dim1=1, dim2=2).sum(1)[:, None, None].clamp(min=1e-24)
    gram, factor = gram / square, square.rsqrt()
    for iteration in range(iterations):
        if last is not None and iteration == iterations - LOW_ITERATIONS:
            gram = gram.to(last)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=1, dim2=2).add_(a)
        factor = polynomial.to(dtype) @ factor if iteration else polynomial * factor
        if iteration < iterations - 1:
            gram = polynomial @ (gram @ polynomial)
    return factor


LIMITS = ("limit_train_batches", "max_epochs", "max_steps", "accumulate_grad_batches")  # they decide a run's steps


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
        schedule_steps: Steps of the schedule, whose last learning rate holds after them; None for all steps of the run.
        lr_factors: Factors of the learning rates of modules, by name.
    """

    optimizer: Callable[[list[ParameterGroup]], Optimizer]
    schedule: Schedule
    weight_decay: float

    layer_decay: float = 1.0
    schedule_steps: int | None = None
    lr_factors: Mapping[str, float] = field(default_factory=dict)

    def create_optimizer(self, model: nn.Module) -> Optimizer:
        """The optimiser of a model's weights.

        Raises:
            UserError: None of them is trained, or none of a module with a factor of the learning rate.
        """
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not trained:
            raise UserError(
                "task.freeze freezes all parameters, so there is nothing to train; remove one of its modules"
            )
        for module in self.lr_factors:
            if not any(name.startswith(f"{module}.") for name in trained):
                raise UserError(f"lr_factors: {module} is not trained; remove it")
        return self.optimizer(parameter_groups(model, self.weight_decay, self.layer_decay, self.lr_factors))

    def factors(self, optimizer: Optimizer, total: int) -> list[Callable[[int], float]]:
        """Returns, for each parameter group, a function from a step to its learning rate as a share of the highest."""
        return [partial(self.factor, total=total, scale=group["scale"]) for group in optimizer.param_groups]

    def factor(self, step: int, total: int, scale: float = 1.0) -> float:
        """The learning rate of a step, as a share of the highest.

        Args:
            total: Steps of the run.
            scale: Factor of a parameter group.
        """
        if self.schedule_steps is not None:
            step, total = min(step, self.schedule_steps - 1), self.schedule_steps
        return scale * self.schedule.factor(step, total)


def total_steps(trainer: L.Trainer) -> int | None:
    """Optimiser steps of the entire run; None if the run has no limit.

    The trainer's estimate would create the training loader before a resumed run has restored its position.
    """
    limits = {name: getattr(trainer, name) for name in LIMITS}
    return count_steps(trainer.datamodule.train_batches(), limits)  # type: ignore[attr-defined]


def count_steps(batches: int, limits: Mapping[str, Any]) -> int | None:
    """Optimiser steps of a run with these batches per epoch; None if the run has no limit.

    Args:
        limits: Values of the trainer, by the names in LIMITS.
    """
    limit = limits.get("limit_train_batches")
    limit = 1.0 if limit is None else limit
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    epochs = limits.get("max_epochs") or -1
    steps = -(-batches // (limits.get("accumulate_grad_batches") or 1)) * epochs if epochs > 0 else -1
    return min((count for count in (steps, limits.get("max_steps") or -1) if count > 0), default=None)


def schedule_note(
    before: Optimization, now: Optimization, totals: tuple[int, int], step: int, highest: float, option: str
) -> str:
    """A line about the learning rate of a resumed run whose schedule has changed.

    It is empty if the rate is the same, or if no step is left.

    Args:
        before, now: Optimisation of the saved config and of the resumed run.
        totals: Steps of both.
        step: Steps that are done.
        highest: Highest learning rate.
        option: Name of the option that sets the steps of the schedule.
    """
    if step >= totals[1]:  # nothing is left to train
        return ""
    planned = before.schedule_steps or totals[0]
    last = highest * before.factor(min(step, planned) - 1, totals[0])
    then = highest * before.factor(min(step, planned - 1), totals[0])
    rate = highest * now.factor(step, totals[1])
    if now.schedule_steps != before.schedule_steps and math.isclose(rate, last, rel_tol=0.01):
        return f"learning rate: stays at {rate:.1e}, as in the last of the {now.schedule_steps or totals[1]:,} steps"
    if math.isclose(rate, then, rel_tol=0.01):
        return ""
    length = now.schedule_steps or totals[1]
    keep = f"; {option}={step} keeps it at {last:.1e}" if step >= planned else ""
    return (
        f"learning rate: was {last:.1e} in step {step:,} and continues at {rate:.1e}, because the schedule now has "
        f"{length:,} steps instead of {planned:,}{keep}"
    )


def parameter_groups(
    model: nn.Module, weight_decay: float, layer_decay: float = 1.0, lr_factors: Mapping[str, float] | None = None
) -> list[ParameterGroup]:
    """Parameter groups: only matrices of linear and convolution layers decay, and lower layers learn more slowly.

    Biases, norms, embeddings and positions do not decay (as in GPT-2 and timm): shrinking them does not help. A layer
    with one output has a vector, not a matrix, because Muon's steps would be too short for the scores of soft
    attention.

    Args:
        layer_decay: Ratio of a layer's learning rate to that of the layer above (Clark et al. 2020, appendix A); 1 is
            off.
        lr_factors: Factors of the learning rates of modules, by name; a module within another has its own.
    Returns:
        Groups with "matrices", True if they hold matrices, and "scale", a factor of their learning rate.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    matrices = {id(layer.weight) for layer in layers if len(layer.weight) > 1}
    depths, factors = layer_depths(model), lr_factors or {}
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            module = max((module for module in factors if name.startswith(f"{module}.")), key=len, default=None)
            scale = layer_decay ** depths[name] * (1.0 if module is None else factors[module])
            groups.setdefault((id(parameter) in matrices, scale), []).append(parameter)
    return [
        {"params": params, "weight_decay": weight_decay if decays else 0.0, "matrices": decays, "scale": scale}
        for (decays, scale), params in sorted(groups.items(), key=lambda item: (not item[0][0], -item[0][1]))
    ]


# Modules below the first block of a stack.
_BOTTOM = ("patch_embed", "positions", "class_token", "token_embed")


@runtime_checkable
class SupportsLayerDepths(Protocol):
    """A module that reports the depths of its layers."""

    def layer_depths(self) -> dict[str, int]:
        """Returns the number of layers above each parameter, by name; 0 for heads and last norms."""


def layer_depths(model: nn.Module) -> dict[str, int]:
    """Number of layers above each parameter in its stack: 0 for heads and last norms, 1 for the last block."""
    depths: dict[str, int] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, SupportsLayerDepths):
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
