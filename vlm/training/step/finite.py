"""The check that an optimiser step's numbers are finite, and the stop of a run where they are not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vlm.errors import SharedError
from vlm.training.step.fsdp import local
from vlm.training.step.loss_sums import Step
from vlm.training.step.step import overflow_is_handled

SHOWN = 8  # names of samples in a message; a longer list goes into a file
TRAINED = ("state_dict", "ema", "optimizer_states")  # the parts of a checkpoint that must be finite
CAUSES = (
    "usual causes: a learning rate that is too high (optim.lr) or not warmed up (schedule.warmup), gradients that are "
    "not clipped (trainer.gradient_clip_val), 16-bit numbers (trainer.precision), or one of the samples"
)


class NotFiniteError(SharedError):
    """An update, or a checkpoint, would hold a number that is not finite."""

    repeats = True  # in a run that is resumed with nothing changed


def answers_later(device: torch.device) -> bool:
    """True for a device that the host runs ahead of: reading one of its numbers at once would wait for it."""
    return device.type == "cuda"


class NumbersOnTheWay:
    """Numbers on their way from the device; reading them waits for what was launched before they were sent.

    Args:
        numbers: The numbers, on the device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._sent = torch.cuda.Event() if numbers.is_cuda else None
        if self._sent is not None:
            self._sent.record()

    def read(self) -> list[float]:
        if self._sent is not None:
            self._sent.synchronize()
        return self._numbers.tolist()


@dataclass
class StepCheck:
    """The check of an optimiser step: its loss, and the norm of its gradients, which is finite only if each of them is.

    On a CPU the host reads the answer before the update. A fused optimiser on a GPU reads it there, and skips an update
    that is not finite; the host reads it when the next step's backward pass is launched, and waits for nothing:

        step             4        5        6
        host launches    4        5        6
        host reads                4        5: not finite, the run stops; step 6 changed nothing that is saved

    No step is saved before it is read. All ranks have the same loss and norms, so that all stop together.

    Args:
        number: Of the step, from 1.
        batches: Its batches.
        parameters: Those with a gradient.
        loss, norms: Its loss, and the norm of each gradient.
        answer: Whether they are not finite (1), then what else the ranks share.
    """

    number: int
    batches: Step
    parameters: list[nn.Parameter]
    loss: Tensor
    norms: Tensor
    answer: NumbersOnTheWay

    def settle(self, trainer: L.Trainer, model: nn.Module) -> list[float]:
        """Reads the answer: what the ranks share beside the check.

        Raises:
            NotFiniteError: Loss or gradients are not finite, and it is not for a loss scaler to skip the step.
        """
        bad, *shared = self.answer.read()
        if bad and not (bool(torch.isfinite(self.loss)) and overflow_is_handled(trainer)):
            stop(trainer, model, self)
        return shared


def check(
    trainer: L.Trainer, optimizer: torch.optim.Optimizer, batches: Step, loss: Tensor, norms: Tensor, shared: Tensor
) -> StepCheck:
    """Begins the check of a step whose gradients are ready; `can_skip` says when it is to be settled.

    Args:
        shared: Further numbers that the host reads with it.
    """
    bad = torch.isfinite(loss + torch.linalg.vector_norm(norms)).logical_not().to(norms.dtype)
    if can_skip(optimizer):
        optimizer.found_inf = bad  # type: ignore[attr-defined]
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    answer = NumbersOnTheWay(torch.cat([bad[None], shared.to(bad.dtype)]))
    return StepCheck(trainer.global_step + 1, batches, parameters, loss, norms, answer)


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """True for an optimiser that skips an update on the device, without the host's knowing of it."""
    first = optimizer.param_groups[0]["params"][0]
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and answers_later(first.device) and not isinstance(first, DTensor)


def stop(trainer: L.Trainer, model: nn.Module, checked: StepCheck) -> None:
    """Stops the run at an update that is not finite. All ranks come here together, and may talk to each other.

    Raises:
        NotFiniteError: Always, with the step, the samples and the usual causes.
    """
    guilty, names = checked.batches.suspects()
    reports: list[Any] = [(trainer.global_rank, guilty, names)]
    if trainer.world_size > 1:
        own, reports = reports[0], [None] * trainer.world_size
        torch.distributed.all_gather_object(reports, own)
    suspects = [report for report in reports if report[1]] or reports
    if bool(torch.isfinite(checked.loss)):
        what = f"the gradient is not finite ({_where(model, checked)})"
    else:
        what = f"the loss is not finite ({float(checked.loss):g})"
    lines = [f"step {checked.number}: {what}; the step was not taken"]
    for rank, _, ids in suspects:
        read = f"rank {rank} read" if trainer.world_size > 1 else "it read"
        lines.append(f"{read} {_listed(trainer, checked.number, rank, ids)}")
    raise NotFiniteError("\n".join([*lines, CAUSES]), 1)


def _where(model: nn.Module, checked: StepCheck) -> str:
    """The first parameters whose gradient is not finite."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    norms = zip(checked.parameters, checked.norms.isfinite().tolist(), strict=True)
    bad = [names[id(parameter)] for parameter, finite in norms if not finite]
    if not bad:
        return "its norm overflows"
    return f"of {', '.join(bad[:2])}{f' and {len(bad) - 2} more' if len(bad) > 2 else ''}"


def _listed(trainer: L.Trainer, step: int, rank: int, names: Sequence[str]) -> str:
    if len(names) <= SHOWN:
        return ", ".join(names)
    path = Path(trainer.default_root_dir) / f"not_finite_step_{step}_rank_{rank}.txt"
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
