"""Scaled dot-product attention, and the layers and cache built on it.

Legend of shapes, used in the whole package:
    B rows    L text tokens of a row    S context tokens    D width    N heads    K width of a head    V vocabulary
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# What a query may attend to: everything (None), itself and what stands before it ("causal"), or a bool mask
# broadcastable to (B, N, L, S) where True means "may attend".
MayAttend = Tensor | Literal["causal"] | None


def causal_within(segments: Tensor) -> Tensor:
    """Causal attention inside each segment of a row, so that captions lying end to end do not see each other.

    Shapes:
        segments (B, L) -> bool mask (B, 1, L, L)
    """
    length = segments.shape[1]
    same = segments[:, None, :, None] == segments[:, None, None, :]  # (B, 1, L, L)
    return same & torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()


def attention(q: Tensor, k: Tensor, v: Tensor, *, may_attend: MayAttend = None, dropout: float = 0.0) -> Tensor:
    """softmax(q kᵀ / √K) v over what may be attended to (Vaswani et al. 2017, equation 1).

    Every attention of the package goes through here.

    Args:
        may_attend: None, "causal" or a bool mask, True = may attend. "causal" aligns the last query with the last key.
        dropout: Probability of dropping an attention weight.
    Shapes:
        q (B, N, L, K), k and v (B, N, S, K) -> (B, N, L, K)
    """
    if isinstance(may_attend, str):
        if q.shape[2] == k.shape[2]:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        may_attend = None if q.shape[2] == 1 else _causal_tail(q.shape[2], k.shape[2], q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=may_attend, dropout_p=dropout)


def _causal_tail(queries: int, keys: int, device: torch.device) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class KeyValueCache:
    """Keys and values of the tokens decoded so far, in memory allocated once.

    Shapes:
        append: k, v (B, N, L, K) -> views of all keys and values so far, (B, N, length, K)
    """

    def __init__(self, *, rows: int, heads: int, max_len: int, head_dim: int, like: Tensor) -> None:
        self.keys = like.new_empty(rows, heads, max_len, head_dim)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k.shape[2]
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def select(self, rows: Tensor) -> None:
        """Keeps these rows (B',), in this order."""
        self.keys, self.values = self.keys[rows], self.values[rows]


def width_of_head(dim: int, num_heads: int, head_dim: int | None) -> int:
    """K: as given, or D / N.

    Raises:
        ValueError: N does not divide D.
    """
    if head_dim is None and dim % num_heads:
        raise ValueError(f"num_heads {num_heads} does not divide dim {dim}; change one, or set head_dim")
    return head_dim or dim // num_heads


class SelfAttention(nn.Module):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2.2).

    Args:
        dim: Width D of the input and output.
        num_heads: Number N of heads.
        head_dim: Width K of a head; by default D / N.
        dropout: Probability of dropping an attention weight.
        bias: Whether the four projections have biases.
    Shapes:
        x (B, L, D) -> (B, L, D)
    """

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = width_of_head(dim, num_heads, head_dim)
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * num_heads * self.head_dim, bias=bias)
        self.proj = nn.Linear(num_heads * self.head_dim, dim, bias=bias)

    def forward(self, x: Tensor, may_attend: MayAttend = None, cache: KeyValueCache | None = None) -> Tensor:
        q, k, v = (
            self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        )  # each (B, N, L, K)
        if cache is not None:
            k, v = cache.append(k, v)
        x = attention(q, k, v, may_attend=may_attend, dropout=self.dropout if self.training else 0.0)
        return self.proj(x.transpose(1, 2).flatten(2))  # (B, N, L, K) -> (B, L, D)


class CrossAttention(nn.Module):
    """Attention of text to context (Vaswani et al. 2017, section 3.2.3); keys and values are computed once a context.

    Args:
        dim: Width D of the text.
        context_dim: Width of the context's states.
        num_heads, head_dim, dropout, bias: As in SelfAttention.
    Shapes:
        keys_values: states (B, S, context_dim) -> k, v (B, N, S, K)
        forward: x (R, L, D), k and v (B, N, S, K), mask (B, S) or None -> (R, L, D).
            R is B, or B * beams: the beams of an image share its keys and values without a copy of them.
    """

    def __init__(
        self,
        *,
        dim: int,
        context_dim: int,
        num_heads: int,
        head_dim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = width_of_head(dim, num_heads, head_dim)
        self.dropout = dropout
        inner = num_heads * self.head_dim
        self.q = nn.Linear(dim, inner, bias=bias)
        self.kv = nn.Linear(context_dim, 2 * inner, bias=bias)
        self.proj = nn.Linear(inner, dim, bias=bias)

    def keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.kv(states).unflatten(-1, (2, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        return k, v  # each (B, N, S, K)

    def forward(self, x: Tensor, keys_values: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        k, v = keys_values
        rows, length, _ = x.shape
        # Cross-attention ignores the order of queries, so the beams of an image are more queries of one row.
        queries = rows * length // max(1, k.shape[0])  # no -1 for the reshape to guess: a batch may have no rows
        q = self.q(x).reshape(k.shape[0], queries, self.num_heads, self.head_dim).transpose(1, 2)  # (B, N, R/B*L, K)
        may_attend = None if mask is None else mask[:, None, None, :]  # (B, 1, 1, S)
        out = attention(q, k, v, may_attend=may_attend, dropout=self.dropout if self.training else 0.0)
        return self.proj(out.transpose(1, 2).reshape(rows, length, self.num_heads * self.head_dim))  # (R, L, D)
