"""Cross-entropy over a vocabulary without ever holding the logits of all tokens.

Logits, their softmax and its gradient are each T x V numbers: for 2,000 tokens and 8,000 words 64 MB, fetched from the
system and given back at every step. Here a few hundred tokens go through the head at a time, and their gradients are
taken on the way, so that nothing is computed twice.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits that may stand at once. A GPU wants large products; a CPU wants what it has just written to be near.
MOST = {"cpu": 1 << 22, "cuda": 1 << 28}


def vocabulary_loss(hidden: Tensor, labels: Tensor, weight: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Summed cross-entropy in nats.

    Args:
        label_smoothing: Share of the target spread evenly over the vocabulary.
    Shapes:
        hidden (T, D), labels (T,), weight (V, D) -> ()
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if len(labels) <= _rows(weight):
        logits = F.linear(hidden, weight).float()  # (T, V)
        return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    return _InParts.apply(hidden, labels, weight, label_smoothing)


@torch.no_grad()
def token_losses(hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Cross-entropy of each token in nats, without a gradient: hidden (T, D), labels (T,), weight (V, D) -> (T,)."""
    parts = _parts(hidden, labels, weight)
    return torch.cat([F.cross_entropy(F.linear(x, weight).float(), y, reduction="none") for x, y in parts])


def _rows(weight: Tensor) -> int:
    return max(1, MOST["cpu" if weight.device.type == "cpu" else "cuda"] // len(weight))


def _parts(hidden: Tensor, labels: Tensor, weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows = _rows(weight)
    return zip(hidden.split(rows), labels.split(rows), strict=True)


class _InParts(torch.autograd.Function):
    """Sums over parts; dL/dlogits = softmax(logits) - target is used for both gradients while it is there."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, labels: Tensor, weight: Tensor, label_smoothing: float) -> Tensor:
        spread = label_smoothing / len(weight)
        low = weight.to(hidden.dtype)  # once, and not for each part
        total = torch.zeros((), device=hidden.device)
        wanted = any(ctx.needs_input_grad)
        grads, grad_weight = [], torch.zeros_like(weight) if wanted else None
        for part, targets in _parts(hidden, labels, weight):
            logprobs = F.linear(part, low).float().log_softmax(-1)  # (T, V)
            own = logprobs.gather(1, targets[:, None])
            total -= (1 - label_smoothing) * own.sum()
            if spread:
                total -= spread * logprobs.sum()
            if grad_weight is None:
                continue
            error = logprobs.exp_().sub_(spread) if spread else logprobs.exp_()
            error.scatter_add_(1, targets[:, None], torch.full_like(own, label_smoothing - 1))
            error = error.to(hidden.dtype)
            grads.append(error @ low)
            grad_weight += error.t() @ part
        if grads:
            ctx.save_for_backward(torch.cat(grads), grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grads[0], None, grad_weight * grads[0], None
