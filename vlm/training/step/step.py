"""The gradients of an optimiser step: their norms, clipping, and the scale of a loss in 16 bits."""

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from vlm.training.step.fsdp import local

SMALLEST_SCALE = 1e-4  # of a loss in 16 bits: whoever overflows at this one does so at any


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients that an optimiser is about to use; this rank's part of them, where they are sharded."""
    return [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def gradient_norms(optimizer: torch.optim.Optimizer) -> Tensor:
    """The norm of each parameter's gradient, the same on all ranks: (P,)."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norms = torch.stack(list(torch._foreach_norm(grads)))
    return norms.full_tensor() if isinstance(norms, DTensor) else norms


def clip(optimizer: torch.optim.Optimizer, limit: float, norm: Tensor | None) -> None:
    """Scales the gradients down to a norm (Pascanu et al. 2013), or clips each value where there is no norm."""
    grads = gradients(optimizer)
    if norm is not None:
        torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
        return
    torch._foreach_clamp_min_(grads, -limit)
    torch._foreach_clamp_max_(grads, limit)


def unscale(optimizer: torch.optim.Optimizer, trainer: L.Trainer) -> None:
    """Divides the gradients by the scale of a 16-bit loss, where the trainer left that to a fused optimiser.

    Within the optimiser's own kernel it would come after clipping, which would clip by the scaled norm.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        scaler.unscale_(optimizer)


def overflow_is_handled(trainer: L.Trainer) -> bool:
    """True where a loss scaler deals with gradients that are not finite: it skips the step, and scales by less."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and scaler.get_scale() > SMALLEST_SCALE
