"""Devices, and the number types that are fast on them."""

import torch

from vlm.errors import UserError, unknown_choice


def has_bfloat16(device: torch.device | str) -> bool:
    """Returns True if the device multiplies in bfloat16 faster than in float32."""
    return explain_bfloat16(device)[0]


def explain_bfloat16(device: torch.device | str) -> tuple[bool, str]:
    """Returns whether the device multiplies in bfloat16 faster than in float32, and why.

    On a CPU it depends on the processor: AMD's AVX512-BF16 has twice the rate of float32, and AMX has more. Intel's
    AVX512-BF16 without AMX, found on some virtual machines, has half (84 against 155 GFLOP/s on one core of a Xeon).
    """
    kind = torch.device(device).type
    if kind == "cuda":
        low = torch.cuda.is_bf16_supported(including_emulation=False)
        return low, f"the GPU computes bfloat16 {'natively' if low else 'only by emulation in float32'}"
    if kind != "cpu":
        return False, "bfloat16 is not faster than float32 on this device"
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("amx_bf16", False):
        return True, "the processor has AMX"
    if not capabilities.get("avx512_bf16", False):
        return False, "the processor has neither AMX nor AVX512-BF16"
    if "Intel" in capabilities.get("cpu_name", ""):
        return False, "Intel's AVX512-BF16 without AMX is slower than float32"
    return True, "the processor's AVX512-BF16 is twice as fast"


def explain_int8(device: torch.device | str) -> tuple[bool, str]:
    """Returns whether the device multiplies by 8-bit weights faster than by float32, and why."""
    if torch.device(device).type != "cpu":
        return False, "8-bit weights are supported on CPUs only"
    from vlm.nn.step.native import load_library
    from vlm.nn.step.packed import is_supported

    if not is_supported():
        return False, "there is no C++ compiler, and this build of torch has no FBGEMM for this processor"
    vnni = torch.cpu.get_capabilities().get("avx512_vnni", False)
    by = "FBGEMM" if load_library() is None else "compiled for this processor"
    return True, f"{by}, {'by VNNI' if vnni else 'inputs of 7 bits, because the processor has no AVX512-VNNI'}"


def widest_float(device: torch.device | str) -> torch.dtype:
    """The widest floating-point type of a device: float64, or float32 on Apple's GPUs."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def choose_device(name: str) -> str:
    """Returns the device for --device.

    Raises:
        UserError: It is unknown, or this machine does not have it.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device, is_available in available.items() if is_available)
    if name not in available:
        raise unknown_choice("--device", name, ("auto", "cpu", "cuda", "mps"))
    if not available[name]:
        raise UserError(f"--device {name}: this machine has no {name.upper()} device that torch can use; choose cpu")
    return name


def choose_precision(name: str, device: str) -> torch.dtype:
    """Returns the dtype of states for --precision; auto chooses bfloat16 if that is faster on the device.

    Raises:
        UserError: It is unknown, or int8 on a device without fast 8-bit products.
    """
    if name not in (choices := ("auto", "fp32", "bf16", "int8")):
        raise unknown_choice("--precision", name, choices)
    has_int8, why = explain_int8(device) if name == "int8" else (True, "")
    if not has_int8:
        raise UserError(f"--precision int8 on {device}: {why}; choose auto")
    low = name == "bf16" or (name == "auto" and has_bfloat16(device))
    return torch.bfloat16 if low else torch.float32
