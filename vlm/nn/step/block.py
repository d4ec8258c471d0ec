"""One decode step of a decoder block over its cache of keys and values."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.nn.blocks import MLP, GatedMLP
from vlm.nn.position import PositionInfo
from vlm.nn.step.frozen import FrozenLinear, FrozenMLP
from vlm.nn.step.packed import InferenceLayer


class Cache(Protocol):
    """The interface of a cache for steps: `append` adds new keys and values and returns all of them."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


class KeyValueCache:
    """Keys and values of the tokens decoded so far, in a ring buffer that is allocated once.

    After max_len tokens, each new one overwrites the oldest: rows that begin while others continue need no extra
    memory, and attention does not depend on the order of keys.

    Shapes:
        append: k, v (B, N, L, K) -> views of all cached keys and values, (B, N, at most max_len, K)
    """

    def __init__(self, *, rows: int, heads: int, max_len: int, head_dim: int, like: Tensor) -> None:
        # Zeros, not uninitialised memory: a masked value has weight 0, and 0 times NaN is NaN.
        self.keys = to_cache_dtype(like.new_empty(0)).new_zeros(rows, heads, max_len, head_dim)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def take_slot(self) -> tuple[int, int]:
        """Assigns a slot to the next token; returns it, and the number of slots that are then in use."""
        max_len = self.keys.shape[2]
        place = self.length % max_len
        self.length += 1
        return place, min(self.length, max_len)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        max_len = self.keys.shape[2]
        place = self.length % max_len if max_len else 0
        self.length += k.shape[2]
        self.keys[:, :, place : place + k.shape[2]] = k
        self.values[:, :, place : place + k.shape[2]] = v
        if self.length >= max_len:
            return self.keys, self.values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def widen(self, max_len: int) -> None:
        """Extends the cache to max_len tokens, as long as none was overwritten."""
        more = (0, 0, 0, max_len - self.keys.shape[2])
        self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)

    def select(self, rows: Tensor) -> None:
        """Keeps only these rows (B',), in this order."""
        self.keys, self.values = self.keys[rows], self.values[rows]


class GrowingCache:
    """Keys and values that grow by concatenation: tensors in and tensors out, as a traced graph needs them.

    Shapes:
        keys, values (B, N, P, K); append: k, v (B, N, L, K) -> (B, N, P + L, K)
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys, self.values = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        return self.keys, self.values


def to_cache_dtype(keys: Tensor) -> Tensor:
    """Keys or values as the cache stores them: in at least 32 bits on a CPU.

    There, the products of a step take twice as long in bfloat16, and rounding would make a text depend on the number of
    texts that are decoded with it.
    """
    return keys.float() if keys.device.type == "cpu" and keys.dtype.itemsize < 4 else keys


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a step that all blocks share: positions of the tokens, and the mask over the cache.

    Args:
        beams: Number G of beams per row.
        length: Number L of tokens per beam.
        position: Arranged like queries: added (B or 1, 1, G * L, K), rotation (B or 1, 1, G * L, K / 2), no bias.
        bias: Added to the products, -inf for invisible keys; None if everything in the cache is visible.
    Shapes:
        bias (B or 1, N or 1, G * L, slots * G), after S columns of the prefix if there is one
    """

    beams: int
    length: int
    position: PositionInfo
    bias: Tensor | None


class StepBlock:
    """The functions and weights of a DecoderBlock for decode steps, without the overhead of modules.

    It computes what `DecoderBlock.forward` computes (tests compare them), except that beams lie in the query axis and
    keys come from caches:

        x (B * G * L, D)
          norm1 -> qkv -> (B, heads, G * L, K) -> cache -> keys (B, N, slots * G, K) -> attention, bias -> proj -> +
          norm_cross -> q (B, N, G * L, K) -> keys of the context (B, N, S, K), once a row ------------> proj -> +
          norm2 -> mlp -> +

    Without cross-attention, the context is a prefix: its keys come before those of the cache, in one softmax.

    Created again for each batch, so that replaced weights take effect.
    """

    def __init__(self, block: Any) -> None:
        self.pre = block.pre_norm
        self.norm1, self.norm2, self.mlp = as_function(block.norm1), as_function(block.norm2), as_function(block.mlp)
        attn, cross = block.attn, block.cross_attn
        self.attn, self.cross = attn, cross
        self.qkv, self.proj = as_function(attn.qkv), as_function(attn.proj)
        self.heads = (attn.num_heads, attn.num_kv_heads, attn.num_kv_heads)
        self.head_dim, self.qk_norm, self.scale = attn.head_dim, attn.qk_norm, attn.scale
        if cross is not None:
            self.norm_cross = as_function(block.norm_cross)
            self.cross_q, self.cross_proj = as_function(cross.q), as_function(cross.proj)

    def step(
        self,
        x: Tensor,
        inputs: StepInputs,
        cache: Cache,
        context: tuple[Tensor, Tensor] | None,
        context_bias: Tensor | None,
    ) -> Tensor:
        """Passes the residual stream of new tokens through the block.

        Shapes:
            x (B * G * L, D) -> the same; keys and values of the context (B, N, S, K)
        """
        pre = self.pre
        prefix = context if self.cross is None else None
        x = x + self.attend_cache(self.norm1(x) if pre else x, inputs, cache, prefix)
        x = x if pre else self.norm1(x)
        if self.cross is not None and context is not None:
            queries = inputs.beams * inputs.length
            x = x + self.attend_context(self.norm_cross(x) if pre else x, queries, context, context_bias)
            x = x if pre else self.norm_cross(x)
        x = x + self.mlp(self.norm2(x) if pre else x)
        return x if pre else self.norm2(x)

    def attend_cache(self, x: Tensor, inputs: StepInputs, cache: Cache, prefix: tuple[Tensor, Tensor] | None) -> Tensor:
        """Appends the new tokens' keys and values to the cache; self-attention to the prefix and the cache."""
        position, beams, length = inputs.position, inputs.beams, inputs.length
        rows = x.shape[0] // (beams * length)
        qkv = self.qkv(x).view(rows, beams * length, sum(self.heads), self.head_dim).transpose(1, 2)
        qkv = position.add(qkv)
        if self.qk_norm is None:  # queries and keys are rotated together
            qk, v = qkv.split_with_sizes((self.heads[0] + self.heads[1], self.heads[2]), 1)  # (B, N, G * L, K)
            q, k = position.rotate(qk).split_with_sizes(self.heads[:2], 1)
        else:
            q, k, v = qkv.split_with_sizes(self.heads, 1)
            q, k = position.rotate(self.qk_norm.queries(q)), position.rotate(self.qk_norm.keys(k))
        if beams > 1 and length > 1:  # the cache is ordered by step, then by beam
            k, v = (part.unflatten(2, (beams, length)).transpose(2, 3).flatten(2, 3) for part in (k, v))
        k, v = cache.append(k, v)
        if prefix is not None:
            k, v = torch.cat([prefix[0], k], dim=2), torch.cat([prefix[1], v], dim=2)  # (B, N, S + slots * G, K)
        out = self.attn.attend(q, k, v, bias=inputs.bias, scale=self.scale)
        return self.proj(out.transpose(1, 2).reshape(x.shape[0], self.heads[0] * self.head_dim))

    def attend_context(self, x: Tensor, queries: int, context: tuple[Tensor, Tensor], bias: Tensor | None) -> Tensor:
        """Cross-attention; the beams of a row are further queries."""
        k, v = context
        rows = x.shape[0] // queries
        q = self.cross_q(x).view(rows, queries, self.heads[0], self.head_dim).transpose(1, 2)  # (B, N, G * L, K)
        if self.cross.qk_norm is not None:
            q = self.cross.qk_norm.queries(q)
        out = self.cross.attend(q, k, v, bias=bias, scale=self.scale)
        return self.cross_proj(out.transpose(1, 2).reshape(x.shape[0], self.heads[0] * self.head_dim))


def as_function(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns a module as a plain function if its type is supported and it has no hooks; else the module itself."""
    if module._forward_hooks or module._forward_pre_hooks:
        return module
    if isinstance(module, InferenceLayer):
        return module.function()
    if isinstance(module, nn.Linear) and type(module) in (nn.Linear, FrozenLinear):
        return partial(F.linear, weight=module.weight, bias=module.bias)
    if type(module) is nn.LayerNorm:
        weights: dict[str, Any] = {"weight": module.weight, "bias": module.bias, "eps": module.eps}
        return partial(torch.layer_norm, normalized_shape=module.normalized_shape, **weights)
    if type(module) is nn.RMSNorm:
        return partial(torch.rms_norm, normalized_shape=module.normalized_shape, weight=module.weight, eps=module.eps)
    children = dict(module.named_children())
    if not isinstance(module, MLP | GatedMLP) or set(children) != {"fc1", "fc2"}:
        return module
    if type(module) not in (MLP, GatedMLP, FrozenMLP):
        return module
    first, second = as_function(children["fc1"]), as_function(children["fc2"])
    if isinstance(module, MLP):
        activation = module.activation
        return lambda x: second(activation(first(x)))
    gate = module.gate

    def gated_mlp(x: Tensor) -> Tensor:
        gates, values = first(x).chunk(2, dim=-1)
        return second(gate(gates) * values)

    return gated_mlp
