"""Randomness as a function of keys: no generator state is ever stored.

Random values (the order of samples, augmentation, dropout, sampled captions) come from new generators that are seeded
with keys such as (seed, epoch, index). A resumed run therefore draws the same values as an uninterrupted one.
"""

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def key(*parts: int | str) -> int:
    """Hashes the parts to a seed in [0, 2**63), the same on every machine and in every process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest(), "little") >> 1


def numpy_rng(*parts: int | str) -> np.random.Generator:
    """Returns a NumPy generator seeded with these keys."""
    return np.random.Generator(np.random.PCG64(key(*parts)))


def seed_torch(seed: int, device: "torch.device | str" = "cpu") -> None:
    """Seeds torch's generators of the CPU and one device, like `torch.manual_seed`.

    `torch.manual_seed` also registers the seed for every absent device, which is slower than many layers.
    """
    import torch  # `vlm score` uses this module without torch

    torch.default_generator.manual_seed(seed)
    if torch.device(device).type == "cuda":
        torch.cuda.manual_seed(seed)
    elif torch.device(device).type == "mps":
        torch.mps.manual_seed(seed)
