"""Caches of the keys and values of decoded tokens."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


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
        self.keys = as_cached(like.new_empty(0)).new_zeros(rows, heads, max_len, head_dim)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        room = self.keys.shape[2]
        place = self.length % room if room else 0
        self.length += k.shape[2]
        self.keys[:, :, place : place + k.shape[2]] = k
        self.values[:, :, place : place + k.shape[2]] = v
        if self.length >= room:
            return self.keys, self.values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def widen(self, max_len: int) -> None:
        """Makes room for more tokens, as long as none was overwritten."""
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


def as_cached(keys: Tensor) -> Tensor:
    """Keys or values as the cache stores them: in at least 32 bits on a CPU.

    There, the products of a step take twice as long in bfloat16, and rounding would make a text depend on how many
    others are decoded with it.
    """
    return keys.float() if keys.device.type == "cpu" and keys.dtype.itemsize < 4 else keys
