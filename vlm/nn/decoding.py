"""One step of a decoder's block over its cache: what `DecoderBlock.forward` computes, with little else around it.

A step of a small model takes as long as the calls around its products, so nothing is done here that one token does not
need: no dropout, no closures, no mask where everything may be seen. Rows are images (or texts), each with G beams.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlm.nn.attention import CrossAttention, KeyValueCache, SelfAttention
from vlm.nn.position import Placed


@dataclass(frozen=True)
class Sight:
    """What the tokens of a step are told of their places, and what they see of the cache.

    Args:
        beams: Number G of beams a row.
        length: Number L of tokens a beam.
        placed: Laid out as the tokens are: added (B * G * L, D), rotation (B or 1, 1, G * L, K / 2), no bias.
        bias: Added to the products, -inf where nothing is seen; None if everything in the cache is.
    Shapes:
        bias (B or 1, N or 1, G * L, slots)
    """

    beams: int
    length: int
    placed: Placed
    bias: Tensor | None


def step_block(
    block: Any,
    x: Tensor,
    sight: Sight,
    cache: KeyValueCache,
    context: tuple[Tensor, Tensor] | None,
    context_bias: Tensor | None,
) -> Tensor:
    """Moves the residual stream of new tokens through a DecoderBlock.

    Shapes:
        x (B * G * L, D) -> the same; keys and values of the context (B, N, S, K)
    """
    pre, cross = block.pre_norm, block.cross_attn
    x = x + attend_cache(block.attn, block.norm1(x) if pre else x, sight, cache)
    x = x if pre else block.norm1(x)
    if cross is not None and context is not None:
        x = x + attend_context(cross, block.norm_cross(x) if pre else x, context, context_bias)
        x = x if pre else block.norm_cross(x)
    x = x + block.mlp(block.norm2(x) if pre else x)
    return x if pre else block.norm2(x)


def attend_cache(layer: SelfAttention, x: Tensor, sight: Sight, cache: KeyValueCache) -> Tensor:
    """Self-attention of new tokens to the cache, which takes their keys and values in: x (B * G * L, D) -> the same."""
    placed, beams, length = sight.placed, sight.beams, sight.length
    rows = x.shape[0] // (beams * length)
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    qkv = layer.qkv(placed.add(x)).view(rows, beams * length, sum(heads), layer.head_dim)
    q, k, v = qkv.transpose(1, 2).split(heads, 1)  # each (B, N, G * L, K)
    if layer.cosine is not None:
        q, k = layer.cosine.queries(q), layer.cosine.keys(k)
    if placed.rotation is not None:
        q, k = placed.rotate(q), placed.rotate(k)
    if beams > 1 and length > 1:  # the cache holds all beams of a step, then those of the next
        k, v = (part.unflatten(2, (beams, length)).transpose(2, 3).flatten(2, 3) for part in (k, v))
    k, v = cache.append(k, v)
    out = layer.attend(q, k, v, bias=sight.bias, scale=None if layer.cosine is None else 1.0)
    return layer.proj(out.transpose(1, 2).reshape(x.shape[0], -1))


def attend_context(layer: CrossAttention, x: Tensor, context: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
    """Cross-attention of new tokens; the beams of a row are more queries of it: x (B * G * L, D) -> the same."""
    k, v = context
    queries = x.shape[0] // max(1, k.shape[0])  # no -1 for the view to guess: a batch may have no rows
    q = layer.q(x).view(k.shape[0], queries, layer.num_heads, layer.head_dim).transpose(1, 2)  # (B, N, G * L, K)
    if layer.cosine is not None:
        q = layer.cosine.queries(q)
    out = layer.attend(q, k, v, bias=bias, scale=None if layer.cosine is None else 1.0)
    return layer.proj(out.transpose(1, 2).reshape(x.shape[0], layer.num_heads * layer.head_dim))


def as_bias(seen: Tensor, like: Tensor) -> Tensor:
    """A bool mask as what is added to products: 0 where it is True, else -inf."""
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


def lay_out_for_decoding(module: torch.nn.Module) -> None:
    """Stores the weights of widening linear layers and of embeddings input-major; their values and shapes stay.

    A product of few rows by such a matrix reads memory in order, and takes 0.3 to 0.9 of the time on a CPU (MKL).
    Narrowing layers are faster as they are.
    """
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Embedding) and layer.weight.shape[0] >= layer.weight.shape[1]:
            layer.weight.data = layer.weight.data.t().contiguous().t()
