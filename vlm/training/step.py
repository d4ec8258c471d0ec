"""Parts of an optimiser step, and the checks that stop one whose numbers are not finite."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlm.errors import SharedError
from vlm.training.fsdp import local
from vlm.training.loss_sums import Step

SHOWN = 8  # names of samples in a message; a longer list goes into a file
TRAINED = ("state_dict", "ema", "optimizer_states")  # the parts of a checkpoint that must be finite
SMALLEST_SCALE = 1e-4  # of a loss in 16 bits: whoever overflows at this one does so at any
CAUSES = (
    "usual causes: a learning rate that is too high (optim.lr) or not warmed up (schedule.warmup), gradients that are "
    "not clipped (trainer.gradient_clip_val), 16-bit numbers (trainer.precision), or one of the samples"
)


class NotFiniteError(SharedError):
    """An update, or a checkpoint, would hold a number that is not finite."""

    repeats = True  # in a run that is resumed with nothing changed


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients that an optimiser is about to use; this rank's part of them, where they are sharded."""
    return [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def total_norm(optimizer: torch.optim.Optimizer) -> Tensor:
    """The norm of all gradients as one vector, the same on all ranks."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


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


def check(trainer: L.Trainer, model: nn.Module, step: Step, loss: Tensor, norm: Tensor) -> None:
    """Stops the run if a step's loss or the norm of its gradients is not finite.

    Clipping needs the norm anyway, which is finite only if every gradient is. Asking the device for the answer is the
    one time in an optimiser step that the host waits for it: asked a step later it would cost nothing, but by then
    weights and moments would be lost. All ranks have the same loss and norm, so that all stop together.

    Raises:
        NotFiniteError: One is not, and it is not for a loss scaler to skip the step.
    """
    if bool(torch.isfinite(loss + norm)):
        return
    if not (bool(torch.isfinite(loss)) and overflow_is_handled(trainer)):
        stop(trainer, model, step, loss)


def stop(trainer: L.Trainer, model: nn.Module, step: Step, loss: Tensor) -> None:
    """Stops the run before an update that is not finite. All ranks come here together, and may talk to each other.

    Raises:
        NotFiniteError: Always, with the step, the samples and the usual causes.
    """
    guilty, names = step.suspects()
    reports: list[Any] = [(trainer.global_rank, guilty, names)]
    if trainer.world_size > 1:
        own, reports = reports[0], [None] * trainer.world_size
        torch.distributed.all_gather_object(reports, own)
    suspects = [report for report in reports if report[1]] or reports
    if bool(torch.isfinite(loss)):
        what = f"the gradient is not finite ({_where(model)})"
    else:
        what = f"the loss is not finite ({float(loss):g})"
    lines = [f"step {trainer.global_step + 1}: {what}; the step was not taken"]
    for rank, _, ids in suspects:
        lines.append(f"{f'rank {rank} read' if trainer.world_size > 1 else 'it read'} {_listed(trainer, rank, ids)}")
    raise NotFiniteError("\n".join([*lines, CAUSES]), 1)


def _where(model: nn.Module) -> str:
    """The first parameters whose gradient is not finite, as this rank holds it."""
    held = [(name, local(p.grad)) for name, p in model.named_parameters() if p.grad is not None]
    bad = [name for name, gradient in held if not bool(torch.isfinite(gradient).all())]
    if not bad:
        return "its norm overflows"
    return f"of {', '.join(bad[:2])}{f' and {len(bad) - 2} more' if len(bad) > 2 else ''}"


def _listed(trainer: L.Trainer, rank: int, names: Sequence[str]) -> str:
    if len(names) <= SHOWN:
        return ", ".join(names)
    path = Path(trainer.default_root_dir) / f"not_finite_step_{trainer.global_step + 1}_rank_{rank}.txt"
    shown = f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more"
    try:
        if trainer.is_global_zero:
            path.write_text("\n".join(names) + "\n", encoding="utf-8")
    except OSError:  # a message without the whole list is better than one about the list
        return shown
    return f"{shown} (all in {path})"


def refuse_non_finite(trainer: L.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Stops a save of weights or optimiser states that are not finite.

    A last update may have made them so out of finite gradients. The state of a callback may be infinite by intent, as
    the first best score of early stopping.

    Raises:
        NotFiniteError: On all ranks, if the part of any holds one.
    """
    trained = {part: checkpoint[part] for part in TRAINED if part in checkpoint}
    named = [(name, local(t)) for name, t in _tensors(trained, "") if t.is_floating_point() and t.numel()]
    # The largest of a tensor's values is not finite if any is: one pass, and small beside writing them.
    sizes = [norm.float().cpu() for norm in torch._foreach_norm([t for _, t in named], float("inf"))]
    bad = [name for (name, _), size in zip(named, sizes, strict=True) if not bool(torch.isfinite(size))]
    if trainer.strategy.reduce_boolean_decision(bool(bad), all=False):
        what = f"{bad[0]}{f' and {len(bad) - 1} more' if len(bad) > 1 else ''}" if bad else "another rank's weights"
        raise NotFiniteError(
            f"step {trainer.global_step}: not saved, for {what} would not be finite in the checkpoint\n{CAUSES}", 1
        )


def _tensors(value: Any, path: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [pair for name, child in inner for pair in _tensors(child, f"{path}.{name}" if path else str(name))]
