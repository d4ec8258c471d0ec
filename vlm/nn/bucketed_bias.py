"""Relative position biases shared by distant offsets."""

import math

import torch
from torch import Tensor, nn

from vlm.errors import Count
from vlm.nn.position import RelativeBias


class BucketedBias(RelativeBias):
    """T5's biases: short offsets have one each, longer ones share them by their logarithm (Raffel et al. 2020, 2.1).

    With 8 buckets and furthest=20, causal:

        offset     0   1   2   3   4   5   6   7   8   9 .. 13   14 ...
        bucket     0   1   2   3   4   4   5   5   5   6         7

    Args:
        num_heads: Number N of heads.
        buckets: Number of biases per head; half of those of a direction belong to a single offset each.
        furthest: Offsets from this one on share the last bias.
        causal: Whether queries attend only to earlier tokens; else half of the buckets are for later ones.
    """

    def __init__(self, *, num_heads: Count, buckets: Count = 32, furthest: Count = 128, causal: bool = True) -> None:
        nn.Module.__init__(self)
        if buckets < 4 or buckets % 4:
            raise ValueError(f"buckets {buckets} is not a multiple of 4; half of each direction's are for one offset")
        if furthest <= buckets // 2:
            raise ValueError(f"furthest {furthest} is not more than half of the {buckets} buckets; give more")
        self.options = {"num_heads": num_heads, "buckets": buckets, "furthest": furthest, "causal": causal}
        self.buckets, self.furthest, self.causal = buckets, furthest, causal
        self.weight = nn.Parameter(torch.zeros(num_heads, buckets))

    def columns(self, offsets: Tensor) -> Tensor:
        count = self.buckets if self.causal else self.buckets // 2
        later = 0 if self.causal else (offsets < 0) * count
        offsets = offsets.clamp(min=0) if self.causal else offsets.abs()
        single = count // 2
        ratio = (offsets.clamp(min=1) / single).log() / math.log(self.furthest / single)
        shared = (single + (ratio * (count - single)).long()).clamp(max=count - 1)
        return later + torch.where(offsets < single, offsets, shared)
