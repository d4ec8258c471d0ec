"""Muon: an optimiser with orthogonalised momentum."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vlm.errors import Count, Injected, Range, Rate
from vlm.nn.precision import has_bfloat16

# Coefficients of the quintic that, iterated, drives every singular value towards 1 (Jordan et al. 2024). It is steep at
# zero, and leaves values between about 0.7 and 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


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
        bfloat16: Whether their products are in bfloat16, as in Jordan et al., if the device is faster in it. The
            iterations amplify its rounding: in a gradient of low rank, the contribution of rare samples is lost.
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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                (self._matrices if group["matrices"] else self._others)(params, group)
        return loss

    def _matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        gradients = [p.grad for p in params if p.grad is not None]
        momenta = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"])
        products = torch.bfloat16 if self.bfloat16 and has_bfloat16(params[0].device) else None
        shapes: dict[torch.Size, list[int]] = {}
        for place, p in enumerate(params):
            shapes.setdefault(p.shape, []).append(place)
        for shape, places in shapes.items():  # matrices of one shape share their products
            stacked = torch.stack([updates[place] for place in places]).flatten(2)  # (count, rows, columns)
            whole = orthogonalized(stacked, group["iterations"], products)
            scale = 0.2 * max(whole.shape[1:]) ** 0.5
            for place, update in zip(places, whole, strict=True):
                params[place].add_(update.view(shape), alpha=-group["lr"] * scale)

    def _others(self, params: list[Tensor], group: dict[str, Any]) -> None:
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


def orthogonalized(matrices: Tensor, iterations: int, products: torch.dtype | None = None) -> Tensor:
    """Returns approximately the nearest matrices with orthonormal rows or columns: U V' of the SVD U S V'.

    Args:
        products: dtype of the products; None for that of the matrices.
    Shapes:
        matrices (count, rows, columns) -> the same
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12)).to(products or matrices.dtype)
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)
