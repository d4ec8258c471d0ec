"""Dropout (Srivastava et al. 2014) whose masks cost little to draw on a CPU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEVELS = 1 << 16  # of a random number of 16 bits: a rate is met to 1 in 65,536, and outputs are scaled by what it is


def dropout(x: Tensor, rate: float) -> Tensor:
    """Zeroes elements with probability `rate` and scales the others so that expectations stay.

    On a CPU torch draws each element by itself, on one thread: an eighth of a captioner's training step. Here a draw of
    64 bits serves four elements.
    """
    if rate == 0:
        return x
    share = round(rate * LEVELS)
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not 0 < share < LEVELS:
        return F.dropout(x, rate)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
    dropped = bits.view(torch.int16)[: x.numel()].view(x.shape) < share - LEVELS // 2
    return _Drop.apply(x, dropped, LEVELS / (LEVELS - share))


class Dropout(nn.Module):
    """`dropout` while training, nothing in evaluation.

    Args:
        rate: Probability of zeroing an element.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate) if self.training else x


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(dropped)
        ctx.scale = scale
        return (x * scale).masked_fill_(dropped, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (dropped,) = ctx.saved_tensors
        return (grads[0] * ctx.scale).masked_fill_(dropped, 0), None, None
