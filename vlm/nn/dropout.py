"""Dropout (Srivastava et al. 2014) whose masks cost little to draw on a CPU."""

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
    drawn = bits.view(torch.int16)[: x.numel()].view(x.shape)
    # A product with zeros and ones of its own type takes a third of the time of filling by a mask of bools.
    keep = torch.ge(drawn, share - LEVELS // 2, out=torch.empty(x.shape, dtype=x.dtype))
    return x * keep.mul_(LEVELS / (LEVELS - share))


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
