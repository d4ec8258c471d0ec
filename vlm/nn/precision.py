"""Types of numbers that a device computes fast in."""

import torch


def has_bfloat16(device: torch.device | str) -> bool:
    """True if a device has instructions for products of bfloat16; where it has none, they are slower than float32's."""
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if kind != "cpu":
        return False
    known = torch.cpu.get_capabilities()
    return any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def widest(device: torch.device | str) -> torch.dtype:
    """The widest type of real numbers that a device has: float64, or float32 on Apple's."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64
