"""Types of numbers that a device computes fast in."""

import torch


def has_bfloat16(device: torch.device | str) -> bool:
    """True if a device computes products of bfloat16 faster than those of float32.

    Of a CPU its processor tells: AMD's AVX512-BF16 has twice the rate of float32, AMX has more. Intel's AVX512-BF16
    without AMX, as some virtual machines have it, has half (measured on one core of a Xeon: 84 and 155 GFLOP/s).
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if kind != "cpu":
        return False
    known = torch.cpu.get_capabilities()
    intel = "Intel" in known.get("cpu_name", "")
    return known.get("amx_bf16", False) or (known.get("avx512_bf16", False) and not intel)


def widest(device: torch.device | str) -> torch.dtype:
    """The widest type of real numbers that a device has: float64, or float32 on Apple's."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64
