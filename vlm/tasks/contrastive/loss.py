"""Contrastive losses of pairs; the negatives are the other pairs of a batch over all ranks."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def contrastive_loss(left: Tensor, right: Tensor, scale: Tensor, *, label_smoothing: float = 0.0) -> tuple[Tensor, int]:
    """Symmetric cross-entropy in nats of picking each pair's other half (Radford et al. 2021), summed over the pairs.

    A pair is picked among all pairs of the batch on all ranks. Batches must therefore not be accumulated: see
    `Task.compares_samples`.

    Args:
        scale: Factor of the products, one over the temperature.
        label_smoothing: Share of the target spread evenly over all pairs (Jia et al. 2021, "ALIGN").
    Shapes:
        left (B, D), right (B, D) of norm 1, scale () -> sum (), and the number B of this rank's pairs
    """
    exact = torch.promote_types(left.dtype, torch.float32)
    left, right = left.to(exact), right.to(exact)
    pairs, first = gather_rows(torch.cat([left, right], dim=1))
    all_left, all_right = pairs.chunk(2, dim=1)
    places = torch.arange(first, first + len(left), device=left.device)
    # In bfloat16 a logit near 100 may be wrong by a quarter.
    with torch.autocast(left.device.type, enabled=False):
        logits = [scale * left @ all_right.T, scale * right @ all_left.T]  # (B, all pairs) each
        options: Any = {"reduction": "sum", "label_smoothing": label_smoothing}
        both = [F.cross_entropy(x, places, **options) for x in logits]
    return (both[0] + both[1]) / 2, len(left)


def sigmoid_loss(left: Tensor, right: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, int]:
    """Binary cross-entropy in nats of whether each pair of halves in the batch matches (Zhai et al. 2023), summed.

    This rank's left halves are paired with the right halves of all ranks.

    Args:
        bias: Added to the scaled products.
    Shapes:
        left (B, D), right (B, D) of norm 1, scale (), bias () -> sum (), and the number B of this rank's pairs
    """
    exact = torch.promote_types(left.dtype, torch.float32)
    others, first = gather_rows(right.to(exact))
    places = torch.arange(first, first + len(left), device=left.device)
    with torch.autocast(left.device.type, enabled=False):
        logits = scale * left.to(exact) @ others.T + bias  # (B, all pairs)
        signs = torch.full_like(logits, -1).scatter_(1, places[:, None], 1)
        return -F.logsigmoid(signs * logits).sum(), len(left)


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Concatenates the rows of all ranks; also returns the index of this rank's first row. Differentiable.

    Ranks may have different numbers of rows. They exchange these numbers first, for which the host waits.

    Shapes:
        rows (B, D) -> (sum of all B, D)
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows, 0
    sizes = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.full_like(sizes[0], len(rows)))
    counts = torch.cat(sizes).tolist()
    return _GatherRows.apply(rows, counts), sum(counts[: dist.get_rank()])


class _GatherRows(torch.autograd.Function):
    """The gradient of a row is the sum of its gradients on all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        own = F.pad(rows, (0, 0, 0, max(counts) - len(rows)))
        everyone = [torch.empty_like(own) for _ in counts]
        dist.all_gather(everyone, own)
        return torch.cat([part[:count] for part, count in zip(everyone, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].contiguous().clone()
        dist.all_reduce(summed)
        return summed.split(ctx.counts)[dist.get_rank()], None
