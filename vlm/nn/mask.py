"""Masks: which keys each query may attend to. Shapes as in `vlm.nn.attention`."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Texts(NamedTuple):
    """Causal attention inside each text of packed rows, as a GPU computes it without a mask.

    Shapes:
        segments (B, L); bounds int32 (N + 1,): where each text begins in the rows end to end, and their end
    """

    segments: Tensor
    bounds: Tensor


# Keys that a query may attend to: all (None), its own position and earlier ones ("causal"), those of its own text among
# these (Texts), or a bool mask broadcastable to (B, N, L, S) where True means "may attend".
Mask = Tensor | Literal["causal"] | Texts | None


def within_segments(segments: Tensor, bounds: Tensor | None) -> Mask:
    """Causal attention inside each segment: on a GPU by the bounds of texts, where they are known; else by a mask.

    Shapes:
        segments (B, L), bounds as in Texts
    """
    if bounds is None or not has_text_kernel(segments.device):
        return causal_within(segments)
    return Texts(segments, bounds)


def has_text_kernel(device: torch.device) -> bool:
    """True for a device whose kernels take bounds of texts in the place of a mask."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def within(segments: Tensor) -> Tensor:
    """Attention to both sides inside each segment of a row, so that texts lying end to end do not see each other.

    Padding is a segment too: it sees only itself, so that no row of weights is empty, and no text sees it.

    Shapes:
        segments (B, L) -> bool mask (B, 1, L, L)
    """
    return segments[:, None, :, None] == segments[:, None, None, :]


def causal_within(segments: Tensor) -> Tensor:
    """Causal attention inside each segment of a row.

    Shapes:
        segments (B, L) -> bool mask (B, 1, L, L)
    """
    length = segments.shape[1]
    return within(segments) & causal_tail(length, length, segments.device)


def causal_tail(queries: int, keys: int, device: torch.device) -> Tensor:
    """Causal attention of the last `queries` of `keys` tokens: bool mask (L, S)."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def with_prefix(text: Mask, prefix: Tensor | None, *, count: int, length: int, device: torch.device) -> Tensor:
    """Attention of rows that begin with a prefix (Raffel et al. 2020, figure 4).

    The prefix sees all of itself and nothing of the text; the text sees the prefix, and of itself what it may. Of two
    states p and two captions a and b, end to end:

            p p  a a  b
        p   1 1  0 0  0
        p   1 1  0 0  0
        a   1 1  1 0  0
        a   1 1  1 1  0
        b   1 1  0 0  1

    Args:
        text: Mask of the text alone; one that is no tensor is written out.
        prefix: States of the prefix that may be attended to, (B, S); None for all.
        count: Number S of states.
        length: Number L of tokens.
    Shapes:
        -> bool mask (B or 1, 1, S + L, S + L)
    """
    if isinstance(text, Texts):
        text = causal_within(text.segments)
    whole = torch.ones(length, length, dtype=torch.bool, device=device)
    own = text if isinstance(text, Tensor) else (whole if text is None else whole.tril())[None, None]
    states = torch.ones(1, count, dtype=torch.bool, device=device) if prefix is None else prefix
    # The columns of the prefix are the same for all rows of the mask.
    return F.pad(own, (count, 0, count, 0)) | F.pad(states, (0, length))[:, None, None]


def as_bias(seen: Tensor, like: Tensor) -> Tensor:
    """A bool mask as what is added to products: 0 where it is True, else -inf.

    It is smaller than the products of all heads, and unlike a filling of these it asks nothing of the gradient.
    """
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


def dense(q: Tensor, k: Tensor, mask: Mask, bias: Tensor | None) -> Tensor | None:
    """A mask and a bias as one tensor: a bool mask, or what is added to products."""
    if isinstance(mask, Texts):
        mask = causal_within(mask.segments)
    if isinstance(mask, str):
        mask = None if q.shape[2] == 1 else causal_tail(q.shape[2], k.shape[2], q.device)
    if bias is None or mask is None:
        return mask if bias is None else bias
    return bias.masked_fill(~mask, -torch.inf)
