"""Randomness as a function of keys: no generator's state is ever stored.

Whatever is random (the order of samples, an augmentation, dropout, a sampled caption) is drawn from a fresh generator
seeded by what identifies it, such as (seed, epoch, index). So a resumed run draws what an uninterrupted one would.
"""

from hashlib import blake2b

import numpy as np
import torch


def key(*parts: int | str) -> int:
    """Hashes the parts to an integer in [0, 2**63), the same on every machine and in every process."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest(), "little") >> 1


def numpy_rng(*parts: int | str) -> np.random.Generator:
    """A NumPy generator for these keys."""
    return np.random.Generator(np.random.PCG64(key(*parts)))


def seed_torch(seed: int, device: torch.device | str = "cpu") -> None:
    """Seeds torch's own generators, the CPU's and that of one device, as `torch.manual_seed` does.

    That one also leaves word for every device that is not there, which takes longer than many a layer.
    """
    torch.default_generator.manual_seed(seed)
    if torch.device(device).type == "cuda":
        torch.cuda.manual_seed(seed)
    elif torch.device(device).type == "mps":
        torch.mps.manual_seed(seed)
