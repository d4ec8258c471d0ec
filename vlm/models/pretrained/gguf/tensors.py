"""Tensors of a GGUF file; those that are quantised become float32 by the library `gguf`."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlm.errors import UserError
from vlm.models.pretrained.gguf.header import Place

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = (*PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")


def check_tensors(places: Mapping[str, Place], size: int) -> None:
    """Checks that all tensors are of known types and lie in the file.

    Args:
        size: Of the file, in bytes.
    Raises:
        ValueError: One does not.
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
    """A checked tensor; one that is not quantised stays in the file until it is used."""
    import numpy as np

    content = np.memmap(path, np.uint8, "c", place.start, (_bytes(place),)).view(np.ndarray)
    library = _library()
    kind = library.GGMLQuantizationType(place.kind)
    if kind.name in PLAIN:
        return torch.from_numpy(content).view(PLAIN[kind.name]).view(place.shape)
    return torch.from_numpy(library.dequantize(content.reshape(*place.shape[:-1], -1), kind))


def _block(place: Place) -> tuple[int, int]:
    """Numbers of a block, and its bytes."""
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
