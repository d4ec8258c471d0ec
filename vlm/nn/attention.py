"""Scaled dot-product attention, its masks, and the layers built on it.

Legend of shapes, used throughout the package:
    B rows    L text tokens of a row    S context tokens    D width    N heads    K width of a head    V vocabulary
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vlm.nn.dropout import dropout as drop
from vlm.nn.position import NO_POSITIONS, PositionInfo

FEW_KEYS = 512  # up to this many keys, plain products in bfloat16 beat torch's fused kernel on a CPU


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


def bidirectional_prompt_mask(segments: Tensor, generated: Tensor) -> Tensor:
    """Causal attention inside each segment, in which all tokens also attend to the tokens that are not generated.

    A segment is a prompt followed by its answer: the prompt attends in both directions, the answer is causal
    (PaliGemma: Beyer et al. 2024, section 3.1).

    Shapes:
        segments (B, L), generated bool (B, L) -> bool mask (B, 1, L, L)
    """
    length = segments.shape[1]
    return segment_mask(segments) & (causal_tail(length, length, segments.device) | ~generated[:, None, None])


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


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q kᵀ / √K + bias) v over the keys that the mask allows (Vaswani et al. 2017, equation 1).

    All attention of the package is computed here. Keys and values may have fewer heads, each shared by a group of query
    heads (Ainslie et al. 2023). On a CPU they may have another type than the queries, which are then converted.

    Args:
        mask: Keys that may be attended to, see Mask. "causal" aligns the last query with the last key.
        bias: Added to the scaled products, (N, L, S).
        scale: Factor of the products; default 1 / √K.
        dropout: Probability of dropping an attention weight.
    Shapes:
        q (B, N, L, K), k and v (B, N or a divisor, S, K) -> (B, N, L, K)
    """
    if isinstance(mask, Texts) and bias is None and dropout == 0 and q.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        # A kernel that skips all pairs of two texts (Dao 2024, FlashAttention-2). Its maximum is the row's length,
        # because the longest text changes from batch to batch.
        rows, _, length, _ = q.shape
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))  # (B * L, N, K)
        window = (-1, 0)
        out: Any = varlen_attn(q, k, v, mask.bounds, mask.bounds, length, length, scale=scale, window_size=window)
        return out.unflatten(0, (rows, length)).transpose(1, 2)
    # On a CPU, torch has no fused kernel with dropout, and its bfloat16 kernel is slower up to about 500 keys: forward
    # and backward take 4.1 ms instead of 1.2 at 64 tokens (2 cores with AVX512-BF16).
    few_keys = k.dtype == torch.bfloat16 and k.shape[2] <= FEW_KEYS
    if k.device.type == "cpu" and (dropout > 0 or q.dtype != k.dtype or few_keys):
        weights = attention_weights(q, k, mask=mask, bias=bias, scale=scale)
        return _batched_matmul(drop(weights, dropout), _repeat_heads(v, q)).to(q.dtype)
    options: dict[str, Any] = {"dropout_p": dropout, "scale": scale}
    if k.shape[1] != q.shape[1]:
        options["enable_gqa"] = True  # a plain bool: under torch.compile a comparison of sizes is not one
    if bias is None and isinstance(mask, str) and q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(q, k, mask, bias), **options)


@contextmanager
def changing_lengths(device: torch.device) -> Iterator[None]:
    """Context for attention whose sequence lengths change from call to call; it affects speed only.

    On a GPU it disables cuDNN's kernels, which take up to a second to plan for each new shape.
    """
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for a forward pass and its recomputation in which both choose the same kernels."""
    device = torch.device("cpu" if torch.backends.cuda.cudnn_sdp_enabled() else "cuda")
    return nullcontext(), changing_lengths(device)


def attention_weights(
    q: Tensor, k: Tensor, *, mask: Mask = None, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The attention weights that `attention` computes: (B, N, L, S)."""
    mask = dense_mask(q, k, mask, bias)
    scaled = q.to(k.dtype) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = _batched_matmul(scaled, _repeat_heads(k, q).transpose(-1, -2))  # (B, N, L, S)
    if mask is not None:
        scores = scores + (to_additive_mask(mask, scores) if mask.dtype == torch.bool else mask)
    return scores.softmax(-1)


def _batched_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for 4-D tensors with equal leading dimensions; bmm is a sixth faster than matmul for a single text."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def _repeat_heads(shared: Tensor, q: Tensor) -> Tensor:
    """Repeats shared heads of keys or values for each query head of their group."""
    group = q.shape[1] // shared.shape[1]
    return shared if group == 1 else shared.repeat_interleave(group, dim=1)


class CosineScale(nn.Module):
    """Query-key normalisation: cosine attention with a learned scale per head (Henry et al. 2020).

    The scale bounds the logits, so that large activations cannot saturate attention.

    Args:
        num_heads: Number N of heads.
    Shapes:
        q (B, N, L, K), k (B, N, S, K) -> the same shapes, normalised and scaled
    """

    def __init__(self, *, num_heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((num_heads, 1, 1), 10.0))  # cosines of 1 and 0 get weights of e¹⁰ to 1

    def queries(self, q: Tensor) -> Tensor:
        return F.normalize(q, dim=-1) * self.scale.to(q.dtype)

    def keys(self, k: Tensor) -> Tensor:
        return F.normalize(k, dim=-1)


class HeadNorm(nn.Module):
    """Query-key normalisation by RMSNorm over each head, before positions rotate it (Dehghani et al. 2023; Qwen 3).

    Args:
        head_dim: Width K of a head.
        eps: Added to the mean square for numerical stability.
    Shapes:
        q (B, N, L, K), k (B, N, S, K) -> the same
    """

    def __init__(self, *, head_dim: int, eps: float) -> None:
        super().__init__()
        self.q, self.k = nn.RMSNorm(head_dim, eps=eps), nn.RMSNorm(head_dim, eps=eps)

    def queries(self, q: Tensor) -> Tensor:
        return self.q(q.to(self.q.weight.dtype)).to(q.dtype)

    def keys(self, k: Tensor) -> Tensor:
        return self.k(k.to(self.k.weight.dtype)).to(k.dtype)


class MultiHead(nn.Module):
    """Base of attention layers: the sizes of heads, at most one query-key normalisation, and the output projection.

    Args:
        dim: Width D of the output.
        others: As in SelfAttention.
    Raises:
        ValueError: num_kv_heads does not divide N, or N does not divide D and head_dim is None.
    """

    def __init__(
        self, *, dim: int, num_heads: int, head_dim: int | None, num_kv_heads: int | None, dropout: float
    ) -> None:
        super().__init__()
        if num_kv_heads is not None and (num_kv_heads < 1 or num_heads % num_kv_heads):
            raise ValueError(f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}; change one")
        if head_dim is None and dim % num_heads:
            raise ValueError(f"num_heads {num_heads} does not divide dim {dim}; change one, or set head_dim")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_dim = head_dim or dim // num_heads
        self.dropout = dropout
        self.attend: Callable[..., Tensor] = attention

    def add_output(
        self, dim: int, *, bias: bool, qk_norm: bool | str, attn_scale: float | None, norm_eps: float
    ) -> None:
        """Adds the query-key normalisation and the output projection, after the projections of the subclass."""
        self.cosine = CosineScale(num_heads=self.num_heads) if qk_norm is True else None
        self.head_norm = HeadNorm(head_dim=self.head_dim, eps=norm_eps) if qk_norm == "rms" else None
        self.proj = nn.Linear(self.num_heads * self.head_dim, dim, bias=bias)
        self.scale = attn_scale if self.cosine is None else 1.0  # None for 1 / √K

    @property
    def qk_norm(self) -> CosineScale | HeadNorm | None:
        return self.cosine if self.cosine is not None else self.head_norm

    def output(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attends and projects: (B, N, L, K) -> (B, L, D); options as in `attention`."""
        dropout = self.dropout if self.training else 0.0
        out = self.attend(q, k, v, scale=self.scale, dropout=dropout, **options)
        return self.proj(out.transpose(1, 2).flatten(2))


class SelfAttention(MultiHead):
    """Multi-head self-attention (Vaswani et al. 2017, section 3.2.2).

    Args:
        dim: Width D of the input and output.
        num_heads: Number N of heads.
        head_dim: Width K of a head; default D / N.
        num_kv_heads: Number of heads of keys and values, each shared by a group of query heads; default N.
        dropout: Probability of dropping an attention weight.
        bias: Whether the four projections have biases.
        qkv_bias: Whether the query, key and value projections have biases; default `bias`.
        qk_norm, attn_scale: See BlockConfig.
        norm_eps: Epsilon of qk_norm="rms".
    Shapes:
        x (B, L, D) -> (B, L, D)
    """

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        qkv_bias: bool | None = None,
        qk_norm: bool | str = False,
        attn_scale: float | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(dim=dim, num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, dropout=dropout)
        width = (num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = nn.Linear(dim, width, bias=bias if qkv_bias is None else qkv_bias)
        self.add_output(dim, bias=bias, qk_norm=qk_norm, attn_scale=attn_scale, norm_eps=norm_eps)

    def forward(self, x: Tensor, mask: Mask = None, position: PositionInfo = NO_POSITIONS) -> Tensor:
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads of all three, L, K)
        q, k, v = position.add(qkv).split(heads, dim=1)
        if self.qk_norm is not None:
            q, k = self.qk_norm.queries(q), self.qk_norm.keys(k)
        return self.output(position.rotate(q), position.rotate(k), v, mask=mask, bias=position.bias)


class CrossAttention(MultiHead):
    """Attention of text to context (Vaswani et al. 2017, 3.2.3). Keys and values are computed once per context.

    Args:
        dim: Width D of the text.
        context_dim: Width of the context's states.
        others: As in SelfAttention.
    Shapes:
        keys_values: states (B, S, context_dim) -> k, v (B, num_kv_heads, S, K)
        forward: x (B, L, D), k and v (B, num_kv_heads, S, K), mask (B, S) or None -> (B, L, D)
    """

    def __init__(
        self,
        *,
        dim: int,
        context_dim: int,
        num_heads: int,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        qk_norm: bool | str = False,
        attn_scale: float | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__(dim=dim, num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, dropout=dropout)
        self.q = nn.Linear(dim, num_heads * self.head_dim, bias=bias)
        self.kv = nn.Linear(context_dim, 2 * self.num_kv_heads * self.head_dim, bias=bias)
        self.add_output(dim, bias=bias, qk_norm=qk_norm, attn_scale=attn_scale, norm_eps=norm_eps)

    def keys_values(self, states: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.kv(states).unflatten(-1, (2, self.num_kv_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        return (k if self.qk_norm is None else self.qk_norm.keys(k)), v  # each (B, num_kv_heads, S, K)

    def forward(self, x: Tensor, keys_values: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # (B, N, L, K)
        q = q if self.qk_norm is None else self.qk_norm.queries(q)
        return self.output(q, *keys_values, mask=None if mask is None else mask[:, None, None, :])  # (B, 1, 1, S)


@contextmanager
def record_attention(*layers: MultiHead) -> Iterator[list[list[Tensor]]]:
    """Records the attention weights of these layers inside the context; other layers keep their fast kernels.

    Yields:
        One list per layer with the weights (B, N, L, S) of each call.
    """
    records: list[list[Tensor]] = [[] for _ in layers]

    def attend(
        record: list[Tensor], q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, **options: Any
    ) -> Tensor:
        record.append(attention_weights(q, k, **options).detach())
        return attention(q, k, v, dropout=dropout, **options)

    for layer, record in zip(layers, records, strict=True):
        layer.attend = partial(attend, record)
    try:
        yield records
    finally:
        for layer in layers:
            layer.attend = attention
