"""Keys and values of the tokens that are decoded already."""

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of the tokens decoded so far, in a ring of memory allocated once.

    Once max_len tokens are in, each new one takes the place of the oldest: rows that begin while others go on need no
    more memory than one of them, and attention does not mind the order of keys.

    Shapes:
        append: k, v (B, N, L, K) -> views of all keys and values held, (B, N, at most max_len, K)
    """

    def __init__(self, *, rows: int, heads: int, max_len: int, head_dim: int, like: Tensor) -> None:
        # Zeros: a masked value gets the weight 0, and 0 times NaN is NaN.
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

    def select(self, rows: Tensor) -> None:
        """Keeps these rows (B',), in this order."""
        self.keys, self.values = self.keys[rows], self.values[rows]


def as_cached(keys: Tensor) -> Tensor:
    """Keys or values as decoding keeps them: on a CPU in 32 bits at least.

    A step's few products in bfloat16 take twice as long there, and rounded by other means for one text than for many
    they would make a text depend on how many are decoded with it.
    """
    return keys.float() if keys.device.type == "cpu" and keys.dtype.itemsize < 4 else keys
