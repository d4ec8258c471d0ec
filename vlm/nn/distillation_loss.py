"""Divergence of a student's predictions from a teacher's, or between two passes, a few hundred tokens at a time.

The logits of both sides, and their log-probabilities, are never stored for all tokens at once: they are computed per
chunk, and again in the backward pass. Gradients of `consistency_loss` are computed in the forward pass instead.
"""

from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vlm.nn.vocabulary_loss import chunk_size

COPIES = 8  # tensors of the size of the logits that are in memory together


class TopPredictions(NamedTuple):
    """A teacher's likeliest outcomes of each token or sample, and the remainder: all other outcomes as one more.

    Args:
        outcomes: Ids of the likeliest tokens or classes.
        logprobs: Their log-probabilities at a temperature, and in the last column that of the remainder.
    Shapes:
        outcomes (T, K), logprobs (T, K + 1)
    """

    outcomes: Tensor
    logprobs: Tensor

    def split(self, rows: int) -> list[Self]:
        """Splits them into parts of so many rows."""
        parts = zip(self.outcomes.split(rows), self.logprobs.split(rows), strict=True)
        return [type(self)(*part) for part in parts]


class TeacherStates(NamedTuple):
    """Hidden states of a teacher, and its output head.

    Args:
        hidden: States after the head's transform.
        weight, bias: See `vlm.nn.vocabulary_loss.Head`.
        top_k: Number of the likeliest outcomes to compare; None for all.
    Shapes:
        hidden (T, D), weight (V, D), bias (V,) or None
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    top_k: int | None = None

    def split(self, rows: int) -> list[Self]:
        """Splits the states into parts of so many rows."""
        return [self._replace(hidden=part) for part in self.hidden.split(rows)]


Predictions = Tensor | TopPredictions  # log-probabilities (T, V) of all outcomes, or of the likeliest


def vocabulary_divergence(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher: TeacherStates | Predictions,
    *,
    temperature: float,
    beta: float,
) -> Tensor:
    """Divergence of a student's predictions of tokens from a teacher's, summed over tokens.

    Args:
        hidden: States of the student after its head's transform.
        weight, bias: The student's head.
        teacher, temperature, beta: See `divergence`; predictions must be those at this temperature.
    Shapes:
        hidden (T, D), weight (V, D), bias (V,) or None -> ()
    """
    rows = max(1, chunk_size(weight) // COPIES)

    def compute(part: Tensor, theirs: TeacherStates | Predictions) -> Tensor:
        predictions = predict(theirs, temperature) if isinstance(theirs, TeacherStates) else theirs
        return divergence(F.linear(part, weight, bias), predictions, temperature=temperature, beta=beta).sum()

    total = torch.zeros((), device=hidden.device)
    for part, theirs in zip(hidden.split(rows), teacher.split(rows), strict=True):
        if len(hidden) <= rows or not torch.is_grad_enabled():
            total = total + compute(part, theirs)
        else:
            total = total + checkpoint(compute, part, theirs, use_reentrant=False)
    return total


@torch.no_grad()
def predict(teacher: TeacherStates, temperature: float) -> Predictions:
    """Returns a teacher's log-probabilities (T, V) at a temperature, or those of its likeliest outcomes."""
    logprobs = soften(F.linear(*teacher[:3]), temperature)
    return logprobs if teacher.top_k is None else select_top(logprobs, teacher.top_k)


def soften(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at a temperature, in float32 or wider: (T, V) -> (T, V)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide / temperature).log_softmax(-1)


def select_top(logprobs: Tensor, top_k: int) -> TopPredictions:
    """Returns the likeliest outcomes and the remainder.

    Args:
        top_k: Number of outcomes; fewer than there are, so that some remain.
    Shapes:
        logprobs (T, V)
    """
    outcomes = logprobs.topk(top_k, dim=-1).indices
    return TopPredictions(outcomes, merge_remainder(logprobs, outcomes))


def merge_remainder(logprobs: Tensor, outcomes: Tensor) -> Tensor:
    """Log-probabilities of some outcomes, and in the last column that of all others together.

    Shapes:
        logprobs (T, V), outcomes (T, K) -> (T, K + 1)
    """
    remainder = logprobs.scatter(-1, outcomes, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, outcomes), remainder], -1)


def divergence(logits: Tensor, teacher: Predictions, *, temperature: float, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence of a student from a teacher in nats (Agarwal et al. 2024, equation 1).

    With the mixture m = beta * teacher + (1 - beta) * student it is beta * KL(teacher || m) + (1 - beta) *
    KL(student || m). The limits are forward KL(teacher || student) for beta = 0, the loss of Hinton et al. (2015), and
    reverse KL(student || teacher) for beta = 1, both divided by their factor, as in TRL. The likeliest outcomes of a
    teacher are compared exactly, all others as one outcome, whose probability is the sum of theirs.

    Args:
        logits: The student's logits.
        teacher: Log-probabilities at this temperature.
        temperature: Divisor of the student's logits.
        beta: Weight of the teacher in the mixture, 0 to 1.
    Shapes:
        logits (T, V), teacher (T, V) or top predictions of T rows -> (T,)
    """
    student = soften(logits, temperature)
    if isinstance(teacher, TopPredictions):
        student, teacher = merge_remainder(student, teacher.outcomes), teacher.logprobs
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    weights = student.new_tensor([1 - beta, beta]).log()
    mixture = torch.logaddexp(student + weights[0], teacher + weights[1])
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def consistency_loss(one: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Symmetric divergence of two predictions of the same tokens, summed over tokens (Liang et al. 2021, equation 2).

    It is (KL(one || other) + KL(other || one)) / 2 in nats, and both sides get a gradient.

    Args:
        one, other: Hidden states of two passes with other dropout, after the head's transform.
        weight, bias: See `vlm.nn.vocabulary_loss.Head`.
    Shapes:
        one, other (T, D), weight (V, D), bias (V,) or None -> ()
    """
    device = one.device.type
    if torch.is_autocast_enabled(device):
        one, other = (states.to(torch.get_autocast_dtype(device)) for states in (one, other))
    return _ConsistencyLoss.apply(one, other, weight, bias)


def symmetric_divergence(one: Tensor, other: Tensor) -> Tensor:
    """Symmetric divergence of two predictions of the same classes, as in `consistency_loss`.

    Args:
        one, other: Logits of two passes with other dropout.
    Shapes:
        one, other (N, C) -> (N,)
    """
    one, other = soften(one, 1.0), soften(other, 1.0)
    return (_kl(one, other) + _kl(other, one)) / 2


class _ConsistencyLoss(torch.autograd.Function):
    """Sums the divergence over chunks of tokens and computes the gradients of each chunk in the forward pass."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        low, shift = weight.to(one.dtype), None if bias is None else bias.to(one.dtype)  # once for all chunks
        rows = max(1, chunk_size(weight) // COPIES)
        total = torch.zeros((), device=one.device)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[2] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[3] else None
        grads: list[tuple[Tensor, Tensor]] = []
        for states in zip(one.split(rows), other.split(rows), strict=True):
            logprobs = [soften(F.linear(part, low, shift), 1.0) for part in states]  # twice (T, V)
            probs, log_ratio = [each.exp() for each in logprobs], logprobs[0] - logprobs[1]
            difference = probs[0] - probs[1]
            total = total + (difference * log_ratio).sum() / 2
            if not any(ctx.needs_input_grad):
                continue
            errors = []  # of the logits of each side, whose sign is that of its term in the difference
            for side, sign in zip(probs, (1, -1), strict=True):
                divergence = (side * log_ratio).sum(-1, keepdim=True)  # sign * KL(side || other side), (T, 1)
                errors.append(((side * (log_ratio - divergence) + difference) * (sign / 2)).to(low.dtype))
            grads.append((errors[0] @ low, errors[1] @ low))
            for error, part in zip(errors, states, strict=True):
                if grad_weight is not None:
                    grad_weight += error.t() @ part
                if grad_bias is not None:
                    grad_bias += error.sum(0, dtype=grad_bias.dtype)
        if grads:
            ctx.save_for_backward(*(torch.cat(parts) for parts in zip(*grads, strict=True)), grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad * grads[0] for grad in ctx.saved_tensors)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    """Kullback-Leibler divergence of log-probabilities: (T, V), (T, V) -> (T,)."""
    return F.kl_div(other, one, reduction="none", log_target=True).sum(-1)
