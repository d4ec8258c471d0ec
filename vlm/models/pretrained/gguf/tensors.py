"""Reads tensors of a GGUF file; the library `gguf` dequantises them to float32."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlm.errors import UserError
from vlm.models.pretrained.gguf.header import Place

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Types that the library dequantises.
TYPES = (
    *(*PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)


def check_tensors(places: Mapping[str, Place], size: int) -> None:
    """Checks that all tensors have known types and are inside the file.

    Args:
        size: Size of the file in bytes.
    Raises:
        ValueError: A tensor has an unknown type or an invalid shape, or is not inside the file.
    """
    kinds = {one.value: one.name for one in _library().GGMLQuantizationType}
    for name, place in places.items():
        if (kind := kinds.get(place.kind, place.kind)) not in TYPES:
            raise ValueError(f"{name!r:.60} is of type {kind}, not one of {', '.join(TYPES)}")
        block, _ = _block(place)
        if not place.shape or place.shape[-1] % block or 0 in place.shape:
            raise ValueError(f"{name!r:.60} is of shape {place.shape}, whose rows are no blocks of {block} numbers")
        if place.start + _bytes(place) > size:
            raise ValueError(f"{name!r:.60} ends after the file, which is cut short")


def read_tensor(path: Path, place: Place) -> Tensor:
    """Reads a checked tensor; one that is not quantised is memory-mapped."""
    import numpy as np

    content = np.memmap(path, np.uint8, "c", place.start, (_bytes(place),)).view(np.ndarray)
    library = _library()
    kind = library.GGMLQuantizationType(place.kind)
    if kind.name in PLAIN:
        return torch.from_numpy(content).view(PLAIN[kind.name]).view(place.shape)
    return torch.from_numpy(library.dequantize(content.reshape(*place.shape[:-1], -1), kind))


def _block(place: Place) -> tuple[int, int]:
    """Number of values in a block, and its size in bytes."""
    library = _library()
    block, size = library.GGML_QUANT_SIZES[library.GGMLQuantizationType(place.kind)]
    return block, size


def _bytes(place: Place) -> int:
    block, size = _block(place)
    return math.prod(place.shape) // block * size


def _library() -> Any:
    try:
        import gguf
    except ImportError as fault:
        raise UserError("GGUF files need the library gguf; pip install vlm-lightning[gguf]") from fault
    return gguf
