"""Masks: which keys each query may attend to. Shapes as in `vlm.nn.attention`."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Texts(NamedTuple):
    """Causal attention inside each text of packed rows, described by offsets instead of a mask (GPU kernels).

    Shapes:
        segments (B, L); bounds int32 (N + 1,): cumulative lengths of the texts of all rows, from 0
    """

    segments: Tensor
    bounds: Tensor


# Keys that a query may attend to: all (None), those up to its position ("causal"), the same within its text
# (Texts), or a bool mask broadcastable to (B, N, L, S) where True means "may attend".
Mask = Tensor | Literal["causal"] | Texts | None


def packed_causal_mask(segments: Tensor, bounds: Tensor | None) -> Mask:
    """Causal attention inside each segment: by `bounds` on a GPU if they are given, else by a mask.

    Shapes:
        segments (B, L), bounds as in Texts
    """
    if bounds is None or not has_text_kernel(segments.device):
        return causal_segment_mask(segments)
    return Texts(segments, bounds)


def has_text_kernel(device: torch.device) -> bool:
    """Returns True if the device has a kernel that takes text boundaries instead of a mask."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def segment_mask(segments: Tensor) -> Tensor:
    """Bidirectional attention inside each segment of a row: packed texts do not attend to each other.

    Padding is a separate segment that attends to itself, so that no row of weights is empty.

    Shapes:
        segments (B, L) -> bool mask (B, 1, L, L)
    """
    return segments[:, None, :, None] == segments[:, None, None, :]


def causal_segment_mask(segments: Tensor) -> Tensor:
    """Causal attention inside each segment of a row.

    Shapes:
        segments (B, L) -> bool mask (B, 1, L, L)
    """
    length = segments.shape[1]
    return segment_mask(segments) & causal_tail(length, length, segments.device)


def causal_tail(queries: int, keys: int, device: torch.device) -> Tensor:
    """Causal attention of the last `queries` of `keys` tokens: bool mask (L, S)."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def prefix_mask(
    text: Mask,
    prefix: Tensor | None,
    *,
    count: int,
    length: int,
    device: torch.device,
    causal: bool = False,
    visible: Tensor | None = None,
) -> Tensor:
    """Attention mask of rows that begin with a prefix (Raffel et al. 2020, figure 4).

    The prefix attends to itself only; the text attends to the prefix, and to itself as the text's mask allows. Two
    prefix states p and two packed captions a and b:

            p p  a a  b
        p   1 1  0 0  0      of a causal prefix 1 0
        p   1 1  0 0  0
        a   1 1  1 0  0
        a   1 1  1 1  0
        b   1 1  0 0  1

    Args:
        text: Mask of the text without its prefix.
        prefix: States of the prefix that may be attended to, (B, S); None for all.
        count: Number S of states.
        length: Number L of tokens.
        causal: Whether a prefix state attends only to itself and earlier ones; else to all prefix states.
        visible: States that the text may attend to, (B, S), if these are not those of `prefix`.
    Shapes:
        -> bool mask (B or 1, 1, S + L, S + L)
    """
    if isinstance(text, Texts):
        text = causal_segment_mask(text.segments)
    all_pairs = torch.ones(length, length, dtype=torch.bool, device=device)
    within_text = text if isinstance(text, Tensor) else (all_pairs if text is None else all_pairs.tril())[None, None]
    states = torch.ones(1, count, dtype=torch.bool, device=device) if prefix is None else prefix
    above = states[:, None, None].expand(-1, 1, count, -1)  # (B or 1, 1, S, S)
    above = above & causal_tail(count, count, device) if causal else above
    below = (states if visible is None else visible)[:, None, None].expand(-1, 1, length, -1)  # (B or 1, 1, L, S)
    return _concat_masks([_concat_masks([above, below], dim=2), F.pad(within_text, (0, 0, count, 0))], dim=-1)


def _concat_masks(masks: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates masks of all rows, or of one row that stands for all."""
    rows = max(len(mask) for mask in masks)
    return torch.cat([mask.expand(rows, -1, -1, -1) for mask in masks], dim=dim)


def to_additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Converts a bool mask to an additive one: 0 where it is True, else -inf.

    Adding it is cheaper than filling the scores of all heads, in the forward and the backward pass.
    """
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, -torch.inf)


def dense_mask(q: Tensor, k: Tensor, mask: Mask, bias: Tensor | None) -> Tensor | None:
    """Combines a mask and a bias into one tensor: a bool mask, or an additive one."""
    if isinstance(mask, Texts):
        mask = causal_segment_mask(mask.segments)
    if isinstance(mask, str):
        mask = None if q.shape[2] == 1 else causal_tail(q.shape[2], k.shape[2], q.device)
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, -torch.inf)
