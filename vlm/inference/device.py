"""Device and precision of a model."""

import torch

from vlm.errors import UserError, unknown_choice
from vlm.nn.precision import has_bfloat16, why_int8


def choose_device(name: str) -> str:
    """Returns the device for --device.

    Raises:
        UserError: It is unknown, or this machine does not have it.
    """
    here = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(device for device, there in here.items() if there)
    if name not in here:
        raise unknown_choice("--device", name, ("auto", "cpu", "cuda", "mps"))
    if not here[name]:
        raise UserError(f"--device {name}: this machine has no {name.upper()} device that torch can use; choose cpu")
    return name


def choose_precision(name: str, device: str) -> torch.dtype:
    """Returns the dtype of states for --precision; auto chooses bfloat16 if that is faster on the device.

    Raises:
        UserError: It is unknown, or int8 on a device without fast 8-bit products.
    """
    if name not in (choices := ("auto", "fp32", "bf16", "int8")):
        raise unknown_choice("--precision", name, choices)
    there, why = why_int8(device) if name == "int8" else (True, "")
    if not there:
        raise UserError(f"--precision int8 on {device}: {why}; choose auto")
    low = name == "bf16" or (name == "auto" and has_bfloat16(device))
    return torch.bfloat16 if low else torch.float32
