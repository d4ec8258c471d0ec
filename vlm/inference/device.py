"""Device and precision of a model."""

import torch

from vlm.errors import UserError, unknown_choice
from vlm.nn.precision import explain_int8, has_bfloat16


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
