"""Cross-entropy over a vocabulary without storing the logits of all tokens at once.

The logits, their softmax and its gradient hold T x V numbers each: 64 MB for 2,000 tokens and a vocabulary of 8,000.
Here the head runs on a few hundred tokens at a time, and their gradients are computed in the forward pass, so that
nothing is computed twice.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Maximum number of logits in memory at once. A GPU needs large products; a CPU is fastest when they fit in its cache.
MOST = {"cpu": 1 << 22, "cuda": 1 << 28}
# The vocabulary is padded to a multiple of this: the matrix units of a GPU work on full tiles only.
MULTIPLE = {"cpu": 1, "cuda": 64}


class Head(NamedTuple):
    """The output head: its weights, and the transform before them.

    Args:
        weight: Weight matrix.
        bias: One number per token of the vocabulary.
        transform: Applied to hidden states first, D -> D.
    Shapes:
        weight (V, D), bias (V,) or None
    """

    weight: Tensor
    bias: Tensor | None = None
    transform: Callable[[Tensor], Tensor] | None = None

    def apply_transform(self, hidden: Tensor) -> Tensor:
        return hidden if self.transform is None else self.transform(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)"""
        return F.linear(self.apply_transform(hidden), self.weight, self.bias)


def vocabulary_loss(
    hidden: Tensor,
    labels: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross-entropy in nats, summed over tokens.

    Args:
        weight, bias: Parameters of the head.
        label_smoothing: Share of the target spread evenly over the vocabulary.
        z_loss: Factor of (log Z)^2, which is added; Z is the normaliser of the softmax (Chowdhery et al. 2022, PaLM,
            section 5).
    Shapes:
        hidden (T, D), labels (T,), weight (V, D), bias (V,) or None -> ()
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    if len(labels) <= chunk_size(weight) and device == "cpu":
        logits = F.linear(hidden, weight, bias).float()  # (T, V)
        loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
        return loss + z_loss * logits.logsumexp(-1).square().sum() if z_loss else loss
    return _ChunkedLoss.apply(hidden, labels, weight, bias, label_smoothing, z_loss)


def token_losses(hidden: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Cross-entropy of each token in nats. The backward pass computes the logits of several chunks again.

    Shapes:
        hidden (T, D), labels (T,), weight (V, D), bias (V,) or None -> (T,)
    """
    parts = list(_chunks(hidden, labels, weight))
    if len(parts) == 1 or not torch.is_grad_enabled():
        return torch.cat([_token_losses(*part, weight, bias) for part in parts])
    return torch.cat([checkpoint(_token_losses, *part, weight, bias, use_reentrant=False) for part in parts])


def _token_losses(hidden: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, reduction="none")


def _device_kind(weight: Tensor) -> str:
    return "cpu" if weight.device.type == "cpu" else "cuda"


def chunk_size(weight: Tensor) -> int:
    """Returns the number of tokens whose logits are in memory at once."""
    return max(1, MOST[_device_kind(weight)] // len(weight))


def _chunks(hidden: Tensor, labels: Tensor, weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows = chunk_size(weight)
    return zip(hidden.split(rows), labels.split(rows), strict=True)


def _chunk_loss(
    logits: Tensor, targets: Tensor, total: Tensor, smoothing: float, z_loss: float, words: int, needs_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Adds the loss of logits to a total; returns it with its gradient, softmax(logits) - target, if wanted.

    The gradient of z_loss is 2 z_loss log Z softmax(logits).

    Columns from `words` on are padding; their logits are -inf.

    Shapes:
        logits (T, V), targets (T,), total () -> (), (T, V)
    """
    logprobs = logits.float().log_softmax(-1)  # (T, V)
    target_logprobs = logprobs.gather(1, targets[:, None])
    total = total - (1 - smoothing) * target_logprobs.sum()
    spread = smoothing / words
    if spread:
        total = total - spread * logprobs[:, :words].sum()
    norms = logits.float().logsumexp(-1, keepdim=True) if z_loss else None  # log Z, (T, 1)
    if norms is not None:
        total = total + z_loss * norms.square().sum()
    if not needs_gradient:
        return total, None
    error = logprobs.exp_()
    if norms is not None:
        error *= 1 + 2 * z_loss * norms
    if spread:
        error[:, :words].sub_(spread)
    error.scatter_add_(1, targets[:, None], torch.full_like(target_logprobs, smoothing - 1))
    return total, error.to(logits.dtype)


_chunk_loss_by_device: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "cpu": _chunk_loss,
    "cuda": _chunk_loss,
}


def compile_on_gpu(compiled: Callable[[Any], Any]) -> None:
    """Compiles the element-wise part of the loss on a GPU; as separate operations it reads the logits ten times."""
    _chunk_loss_by_device["cuda"] = compiled(_chunk_loss)


class _ChunkedLoss(torch.autograd.Function):
    """Sums the loss over chunks of tokens and computes the gradients of each chunk in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        label_smoothing: float,
        z_loss: float,
    ) -> Tensor:
        kind, words = _device_kind(weight), len(weight)
        low, shift = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)  # once for all chunks
        if missing := -words % MULTIPLE[kind]:  # pad the vocabulary; the logits of the padding are -inf
            shift = F.pad(low.new_zeros(words) if shift is None else shift, (0, missing), value=-torch.inf)
            low = F.pad(low, (0, 0, 0, missing))
        total = torch.zeros((), device=hidden.device)
        needs_gradient = any(ctx.needs_input_grad)
        needs_hidden, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grads = list[Tensor]()
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias and bias is not None else None
        for part, targets in _chunks(hidden, labels, weight):
            logits = F.linear(part, low, shift)
            total, error = _chunk_loss_by_device[kind](
                logits, targets, total, label_smoothing, z_loss, words, needs_gradient
            )
            if error is None:
                continue
            if needs_hidden:
                grads.append(error @ low)
            if grad_weight is not None:
                grad_weight += (error.t() @ part)[:words]
            if grad_bias is not None:
                grad_bias += error.sum(0, dtype=grad_bias.dtype)[:words]
        if needs_gradient:
            ctx.save_for_backward(torch.cat(grads) if needs_hidden else None, grad_weight, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = (None if grad is None else grad * grads[0] for grad in ctx.saved_tensors)
        return grad_hidden, None, grad_weight, grad_bias, None, None
