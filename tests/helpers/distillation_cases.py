"""Predictions of a random teacher and a random student, whose divergence TRL computes too."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vlm.nn.distillation_loss import TeacherStates, vocabulary_divergence

IGNORE = -100
CASES = {
    f"beta {beta} temperature {temperature}": {"beta": beta, "temperature": temperature}
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0)
    for temperature in (1.0, 2.5)
}


class Sides(NamedTuple):
    """Hidden states and heads of both models, and labels, of which some are ignored.

    Shapes:
        hidden (2, 7, 6), weight (11, 6), teacher_hidden (2, 7, 8), teacher_weight (11, 8), labels (2, 7)
    """

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    labels: Tensor


def make_sides() -> Sides:
    """Numbers that are the same on every machine."""

    def numbers(*shape: int, step: float) -> Tensor:
        return (torch.arange(torch.Size(shape).numel()) * step).sin().view(shape) * 2

    labels = torch.arange(14).view(2, 7) % 11
    labels[0, 5:], labels[1, :2] = IGNORE, IGNORE
    sides = Sides(
        numbers(2, 7, 6, step=0.7),
        numbers(11, 6, step=1.3),
        numbers(2, 7, 8, step=0.9),
        numbers(11, 8, step=1.7),
        labels,
    )
    sides.hidden.requires_grad_()
    sides.weight.requires_grad_()
    return sides


def compute(beta: float, temperature: float) -> dict[str, Any]:
    """Mean divergence over labelled positions and its gradients by vlm."""
    sides = make_sides()
    kept = sides.labels != IGNORE
    teacher = TeacherStates(sides.teacher_hidden[kept], sides.teacher_weight, None)
    options = {"temperature": temperature, "beta": beta}
    loss = vocabulary_divergence(sides.hidden[kept], sides.weight, None, teacher, **options) / kept.sum()
    return summarise(loss, sides)


def summarise(loss: Tensor, sides: Sides) -> dict[str, Any]:
    """The loss, and its gradients by the student's states and head."""
    loss.backward()
    gradients = {name: getattr(sides, name).grad.flatten().tolist() for name in ("hidden", "weight")}
    return {"loss": loss.item(), "gradients": gradients}
