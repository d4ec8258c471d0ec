"""Number types that are fast on a device."""

import torch


def has_bfloat16(device: torch.device | str) -> bool:
    """Returns True if the device multiplies in bfloat16 faster than in float32.

    On a CPU it depends on the processor: AMD's AVX512-BF16 has twice the rate of float32, and AMX has more. Intel's
    AVX512-BF16 without AMX, found on some virtual machines, has half (84 against 155 GFLOP/s on one core of a Xeon).
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
    """The widest floating-point type of a device: float64, or float32 on Apple's GPUs."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64
