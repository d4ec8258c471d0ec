"""Losses as a sum and a count, divided once per optimiser step; and the check that a step's numbers are finite."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.data.batch import IGNORE, Targets, TextRows
from vlm.errors import SharedError, UserError
from vlm.nn.distillation_loss import consistency_loss, symmetric_divergence
from vlm.nn.vocabulary_loss import Head, token_losses, vocabulary_loss
from vlm.training.step.fsdp import to_local


@dataclass
class Term:
    """A term of a loss: the mean of a sum over tokens, samples or pairs, times a weight.

    Args:
        total: The sum.
        count: Number of summed items; an int if it is known on the host.
        weight: Factor of the mean.
    """

    total: Tensor
    count: Tensor | int
    weight: float = 1.0


def token_loss(
    hidden: Tensor, targets: Targets, head: Head, *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, int]:
    """Cross-entropy in nats, summed over the labelled positions; only these go through the head.

    Args:
        label_smoothing: Share of the target spread evenly over the vocabulary (Szegedy et al. 2016, section 7).
        z_loss: As in `vocabulary_loss`.
    Shapes:
        hidden (B, L, D) -> sum (), and the number of labelled positions
    """
    picked = head.apply_transform(targets.pick(hidden))
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    return vocabulary_loss(picked, targets.labels, head.weight, head.bias, **options), targets.count


def consistent_terms(
    passes: Sequence[Tensor], targets: Targets, head: Head, *, weight: float, label_smoothing: float = 0.0
) -> dict[str, Term]:
    """Returns the loss of two passes of a batch with other dropout: the mean of both, and their divergence (R-Drop).

    It is that of Liang et al. (2021, equation 4) over two, with a weight of alpha / 2.

    Args:
        passes: Hidden states of each pass.
        weight: Factor of the divergence.
        label_smoothing: As in `token_loss`.
    Shapes:
        passes: two of (B, L, D)
    """
    losses = [token_loss(hidden, targets, head, label_smoothing=label_smoothing)[0] for hidden in passes]
    one, other = (head.apply_transform(targets.pick(hidden)) for hidden in passes)
    return {
        "tokens": Term((losses[0] + losses[1]) / 2, targets.count),
        "consistency": Term(consistency_loss(one, other, head.weight, head.bias), targets.count, weight=weight),
    }


def consistent_class_terms(
    name: str, passes: Sequence[Tensor], labels: Tensor, count: int, *, weight: float, label_smoothing: float = 0.0
) -> dict[str, Term]:
    """Returns the loss of two passes of a classifier, as `consistent_terms` does for predictions of tokens.

    Args:
        name: Of the term of cross-entropy.
        passes: Logits of each pass.
        labels: The true classes; those that are IGNORE are left out.
        count: Number of the others.
        weight, label_smoothing: As in `consistent_terms`.
    Shapes:
        passes: two of (N, C), labels (N,)
    """
    losses = [class_loss(logits, labels, label_smoothing=label_smoothing)[0] for logits in passes]
    divergence = (symmetric_divergence(*passes) * (labels != IGNORE)).sum()
    return {
        name: Term((losses[0] + losses[1]) / 2, count),
        "consistency": Term(divergence, count, weight=weight),
    }


def check_dropout(model: nn.Module) -> None:
    """Raises a UserError if no part of a model has dropout, without which two passes are equal."""
    rates = (getattr(part, name, 0.0) for part in model.modules() for name in ("rate", "dropout", "token_dropout"))
    if not any(isinstance(rate, float) and rate > 0 for rate in rates):
        raise UserError("task.consistency: has no effect without dropout; set model.size.dropout, or leave it out")


@torch.no_grad()
def row_losses(hidden: Tensor, targets: Targets, head: Head) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, summed over the labelled positions of each row, without a gradient.

    Only these positions go through the head.

    Shapes:
        hidden (B, L, D) -> sums (B,), counts (B,)
    """
    places = slice(None) if targets.places is None else targets.places
    losses = torch.zeros(hidden.shape[:2].numel(), device=hidden.device)
    counts = torch.zeros_like(losses, dtype=torch.long)
    losses[places] = token_losses(head.apply_transform(targets.pick(hidden)), targets.labels, head.weight, head.bias)
    counts[places] = 1
    return losses.view(hidden.shape[:2]).sum(1), counts.view(hidden.shape[:2]).sum(1)


def answer_losses(hidden: Tensor, rows: TextRows, head: Head) -> tuple[Tensor, Tensor]:
    """Cross-entropy in nats, summed over the predicted tokens of each answer of the pairs in some rows.

    Shapes:
        hidden (B, L, D) -> sums (N, 2), counts (N, 2): of the chosen and the rejected answer
    """
    assert rows.pairs is not None
    picked = head.apply_transform(rows.targets.pick(hidden))
    losses = token_losses(picked, rows.targets.labels, head.weight, head.bias)  # (T,)
    return rows.pairs.sum_by_answer(losses), rows.pairs.sum_by_answer(torch.ones_like(losses))


def class_loss(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> tuple[Tensor, int]:
    """Cross-entropy in nats, summed over the images, texts or words; labels that are IGNORE are left out.

    Shapes:
        logits (B, C), targets: labels (B,) or the share of each class (B, C) -> sum (), and the number B
    """
    options: dict[str, Any] = {"ignore_index": IGNORE, "label_smoothing": label_smoothing}
    return F.cross_entropy(logits.float(), targets, reduction="sum", **options), len(targets)


MAX_LISTED = 8  # names of samples in a message; a longer list goes into a file
TRAINED = ("state_dict", "ema", "optimizer_states")  # the parts of a checkpoint that must be finite
CAUSES = (
    "usual causes: a learning rate that is too high (optim.lr) or not warmed up (schedule.warmup), gradients that are "
    "not clipped (trainer.gradient_clip_val), 16-bit numbers (trainer.precision), or one of the samples"
)

Batches = Sequence[tuple[Sequence[str], Mapping[str, Term]]]  # the names of samples, and the terms of their loss


class NotFiniteError(SharedError):
    """An update, or a checkpoint, would hold a number that is not finite."""

    repeats = True  # an unchanged, resumed run fails again


class HostCopy:
    """An asynchronous copy of numbers from the device to the host.

    Args:
        numbers: The numbers, on the device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._sent = torch.cuda.Event() if numbers.is_cuda else None
        if self._sent is not None:
            self._sent.record()

    def read(self) -> list[float]:
        """The numbers; waits for what was launched before them."""
        if self._sent is not None:
            self._sent.synchronize()
        return self._numbers.tolist()


@dataclass
class FiniteCheck:
    """The check of a step.

    Args:
        step: Number of the step, from 1.
        batches: Its batches.
        parameters: Those with a gradient.
        norms: The norm of each gradient.
        numbers: 1 if any is not finite, else 0; the loss; then what the ranks share.
    """

    step: int
    batches: Batches
    parameters: list[nn.Parameter]
    norms: Tensor
    numbers: HostCopy


def runs_ahead(device: torch.device) -> bool:
    """Returns True for an asynchronous device; reading its numbers at once would wait."""
    return device.type == "cuda"


def stop_run(
    trainer: L.Trainer, model: nn.Module, check: FiniteCheck, loss: float, *, is_overflow_handled: bool
) -> None:
    """Stops the run at a step that is not finite. All ranks call it together.

    Args:
        loss: The loss of the step.
        is_overflow_handled: Whether a loss scaler skips the step where only the gradients are not finite.
    Raises:
        NotFiniteError: With the step, the samples and the usual causes.
    """
    if math.isfinite(loss) and is_overflow_handled:
        return
    reports: list[Any] = [(trainer.global_rank, *suspects(check.batches))]
    if trainer.world_size > 1:
        local_report, reports = reports[0], [None] * trainer.world_size
        torch.distributed.all_gather_object(reports, local_report)
    guilty = [report for report in reports if report[1]] or reports
    what = f"the loss is not finite ({loss:g})"
    if math.isfinite(loss):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        norms = zip(check.parameters, check.norms.isfinite().tolist(), strict=True)
        bad = [names[id(parameter)] for parameter, finite in norms if not finite]
        more = f" and {len(bad) - 2} more" if len(bad) > 2 else ""
        what = f"of {', '.join(bad[:2])}{more}" if bad else "its norm overflows"
        what = f"the gradient is not finite ({what})"
    lines = [f"step {check.step}: {what}; the weights were not updated"]
    for rank, _, ids in guilty:
        read = f"rank {rank} read" if trainer.world_size > 1 else "it read"
        lines.append(f"{read} {_format_samples(trainer, check.step, rank, ids)}")
    raise NotFiniteError("\n".join([*lines, CAUSES]), 1)


def suspects(batches: Batches) -> tuple[bool, list[str]]:
    """Returns True if a batch's loss is not finite, and the samples of each such batch; of all batches if none is."""
    bad = [ids for ids, terms in batches if not all(bool(term.total.isfinite()) for term in terms.values())]
    return bool(bad), [str(id) for ids in bad or [ids for ids, _ in batches] for id in ids]


def _format_samples(trainer: L.Trainer, step: int, rank: int, names: Sequence[str]) -> str:
    if len(names) <= MAX_LISTED:
        return ", ".join(names)
    path = Path(trainer.default_root_dir) / f"not_finite_step_{step}_rank_{rank}.txt"
    text = f"{', '.join(names[:MAX_LISTED])} and {len(names) - MAX_LISTED} more"
    try:
        if trainer.is_global_zero:
            path.write_text("\n".join(names) + "\n", encoding="utf-8")
    except OSError:  # report the step even if the full list cannot be written
        return text
    return f"{text} (all in {path})"


def refuse_non_finite(trainer: L.Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Stops a save of weights or optimiser states that are not finite.

    The last update may have overflowed although its gradients were finite. Callback states are not checked: they may be
    infinite on purpose, such as the initial best score of early stopping.

    Raises:
        NotFiniteError: A value on any rank is not finite; raised on all ranks.
    """
    trained = {part: checkpoint[part] for part in TRAINED if part in checkpoint}
    named = [(name, to_local(t)) for name, t in _tensors(trained, "") if t.is_floating_point() and t.numel()]
    # The largest of a tensor's values is not finite if any is: one pass, cheap compared with writing them.
    sizes = [norm.float().cpu() for norm in torch._foreach_norm([t for _, t in named], float("inf"))]
    bad = [name for (name, _), size in zip(named, sizes, strict=True) if not bool(torch.isfinite(size))]
    if trainer.strategy.reduce_boolean_decision(bool(bad), all=False):
        what = f"{bad[0]}{f' and {len(bad) - 1} more' if len(bad) > 1 else ''}" if bad else "another rank's weights"
        raise NotFiniteError(
            f"step {trainer.global_step}: the checkpoint was not saved, because {what} would not be finite\n{CAUSES}", 1
        )


def _tensors(value: Any, path: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(path, value)]
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [pair for name, child in inner for pair in _tensors(child, f"{path}.{name}" if path else str(name))]
