"""One step of a decoder's block over its cache: what `DecoderBlock.forward` computes, with little else around it.

A step of a small model takes as long as the calls around its products, so nothing is done here that one token does not
need: no dropout, no closures, no mask where everything may be seen. Rows are images (or texts), each with G beams.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.nn.blocks import MLP
from vlm.nn.position import PositionInfo
from vlm.nn.step.cache import KeyValueCache
from vlm.nn.step.packed import PackedLinear, PackedMLP


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step that all blocks share: positions of the tokens, and their mask over the cache.

    Args:
        beams: Number G of beams a row.
        length: Number L of tokens a beam.
        position: Laid out as queries are: added (B or 1, 1, G * L, K), rotation (B or 1, 1, G * L, K / 2), no bias.
        bias: Added to the products, -inf where nothing is seen; None if everything in the cache is.
    Shapes:
        bias (B or 1, N or 1, G * L, slots * G), after S columns of the prefix if there is one
    """

    beams: int
    length: int
    position: PositionInfo
    bias: Tensor | None


class StepBlock:
    """A DecoderBlock as a step calls it: its functions and weights at hand, without the machinery of modules.

    The same branches as in `DecoderBlock.forward`, whose values the tests hold it to. Other than there, beams lie in
    the axis of the queries, and keys come from caches:

        x (B * G * L, D)
          norm1 -> qkv -> (B, heads, G * L, K) -> cache -> keys (B, N, slots * G, K) -> attention, bias -> proj -> +
          norm_cross -> q (B, N, G * L, K) -> keys of the context (B, N, S, K), once a row ------------> proj -> +
          norm2 -> mlp -> +

    Without cross-attention, context is a prefix: its keys stand before those of the cache, under one softmax.

    Made anew for each text or batch, so that weights which are replaced meanwhile are seen by the next.
    """

    def __init__(self, block: Any) -> None:
        self.pre = block.pre_norm
        self.norm1, self.norm2, self.mlp = bare(block.norm1), bare(block.norm2), bare(block.mlp)
        attn, cross = block.attn, block.cross_attn
        self.attn, self.cross = attn, cross
        self.qkv, self.proj = bare(attn.qkv), bare(attn.proj)
        self.heads = (attn.num_heads, attn.num_kv_heads, attn.num_kv_heads)
        self.head_dim, self.cosine = attn.head_dim, attn.cosine
        self.scale = None if attn.cosine is None else 1.0
        if cross is not None:
            self.norm_cross, self.cross_q, self.cross_proj = bare(block.norm_cross), bare(cross.q), bare(cross.proj)

    def step(
        self,
        x: Tensor,
        inputs: StepInputs,
        cache: KeyValueCache,
        context: tuple[Tensor, Tensor] | None,
        context_bias: Tensor | None,
    ) -> Tensor:
        """Moves the residual stream of new tokens through the block.

        Shapes:
            x (B * G * L, D) -> the same; keys and values of the context (B, N, S, K)
        """
        pre = self.pre
        prefix = context if self.cross is None else None
        x = x + self.attend_cache(self.norm1(x) if pre else x, inputs, cache, prefix)
        x = x if pre else self.norm1(x)
        if self.cross is not None and context is not None:
            x = x + self.attend_context(self.norm_cross(x) if pre else x, context, context_bias)
            x = x if pre else self.norm_cross(x)
        x = x + self.mlp(self.norm2(x) if pre else x)
        return x if pre else self.norm2(x)

    def attend_cache(
        self, x: Tensor, inputs: StepInputs, cache: KeyValueCache, prefix: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Self-attention to the prefix and the cache, which takes the new tokens' keys and values in."""
        position, beams, length = inputs.position, inputs.beams, inputs.length
        rows = x.shape[0] // (beams * length)
        qkv = self.qkv(x).view(rows, beams * length, sum(self.heads), self.head_dim).transpose(1, 2)
        q, k, v = position.add(qkv).split_with_sizes(self.heads, 1)  # each (B, N, G * L, K)
        if self.cosine is not None:
            q, k = self.cosine.queries(q), self.cosine.keys(k)
        if position.rotation is not None:
            q, k = position.rotate(q), position.rotate(k)
        if beams > 1 and length > 1:  # the cache holds all beams of a step, then those of the next
            k, v = (part.unflatten(2, (beams, length)).transpose(2, 3).flatten(2, 3) for part in (k, v))
        k, v = cache.append(k, v)
        if prefix is not None:
            k, v = torch.cat([prefix[0], k], dim=2), torch.cat([prefix[1], v], dim=2)  # (B, N, S + slots * G, K)
        out = self.attn.attend(q, k, v, bias=inputs.bias, scale=self.scale)
        return self.proj(out.transpose(1, 2).reshape(x.shape[0], self.heads[0] * self.head_dim))

    def attend_context(self, x: Tensor, context: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        """Cross-attention; the beams of a row are more queries of it."""
        k, v = context
        queries = x.shape[0] // max(1, k.shape[0])  # no -1 for the view to guess: a batch may have no rows
        q = self.cross_q(x).view(k.shape[0], queries, self.heads[0], self.head_dim).transpose(1, 2)  # (B, N, G * L, K)
        if self.cross.cosine is not None:
            q = self.cross.cosine.queries(q)
        out = self.cross.attend(q, k, v, bias=bias, scale=self.scale)
        return self.cross_proj(out.transpose(1, 2).reshape(x.shape[0], self.heads[0] * self.head_dim))


def bare(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """A module as a plain function, where its kind is known and it has no hooks; else the module."""
    if module._forward_hooks or module._forward_pre_hooks:
        return module
    if isinstance(module, PackedLinear | PackedMLP):
        return module.function()
    if type(module) is nn.Linear:
        return partial(F.linear, weight=module.weight, bias=module.bias)
    if type(module) is nn.LayerNorm:
        weights: dict[str, Any] = {"weight": module.weight, "bias": module.bias, "eps": module.eps}
        return partial(torch.layer_norm, normalized_shape=module.normalized_shape, **weights)
    children = dict(module.named_children())
    if type(module) is MLP and set(children) == {"fc1", "fc2"}:
        first, second, activation = bare(children["fc1"]), bare(children["fc2"]), module.activation
        return lambda x: second(activation(first(x)))
    return module
