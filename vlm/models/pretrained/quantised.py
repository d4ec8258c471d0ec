"""Quantised weights in safetensors: dequantises FP8 with scales, rejects every other kind by name."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vlm.models.pretrained.fields import Entry, Fields, choice, flag, numbers

KEY = "quantization_config"  # in config.json
SCALES = ".weight_scale_inv"  # factors of a weight, one for the tensor or one for each block
ACTIVATION_SCALE = ".activation_scale"  # of static FP8 activations, which full precision does not need
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
SCHEME = choice("activation_scheme", "dynamic", {"dynamic": False, "static": True})
BLOCK = numbers("weight_block_size", None, 2, 1, 2**20)
# Keys of FP8 folders, with the values that can be read.
ENTRIES: tuple[Entry, ...] = (
    choice("quant_method", None, {"fp8": "fp8"}),
    SCHEME,
    BLOCK,
    choice("fmt", "e4m3", {"e4m3": "e4m3", "e5m2": "e5m2"}),
    choice("scale_fmt", "float", {"float": "float", "ue8m0": "ue8m0"}),
    choice("expert_dtype", "fp8", {"fp8": "fp8"}),
    flag("dequantize", False),
)
# Lists of modules that are or are not quantised, which the types of their weights show.
NEUTRAL = {"modules_to_not_convert", "modules_to_convert", "ignored_layers"}
# Last parts of the names of tensors of GPTQ, AWQ, bitsandbytes, compressed-tensors, MLX and others.
QUANTISED_SUFFIXES = {
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_zero_point", "weight_packed", "weight_shape"),
    *("qweight", "qzeros", "scales", "biases", "g_idx", "weight_g_idx", "SCB", "weight_format", "zeros", "scale"),
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4"),
    *("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale"),
}


class Quantisation(NamedTuple):
    """How the weights of an FP8 folder are quantised.

    Args:
        block: Rows and columns of a weight that share a scale; None for one scale per weight.
        static: Whether scales of activations are stored.
    """

    block: tuple[int, int] | None
    static: bool


def read_quantisation(config: Fields) -> Quantisation:
    """Reads the quantisation that a config.json states.

    Raises:
        UserError: It cannot be dequantised; the message names the key.
    """
    for name in ("text_config", "vision_config", "encoder", "decoder"):
        inner = config.values.get(name)
        if isinstance(inner, dict) and inner.get(KEY) is not None:
            raise config.part(name).error(KEY, "which is supported only at the top level of the file")
    if KEY not in config:
        return Quantisation(None, static=False)
    stated = config.part(KEY)
    if stated.values.get("quant_method") != "fp8":
        raise stated.error("quant_method", "where vlm supports fp8 only")
    for entry in ENTRIES:
        stated.read(entry)
    if unknown := sorted(stated.values.keys() - {entry.name for entry in ENTRIES} - NEUTRAL):
        raise stated.error(unknown[0], "an unknown key of fp8")
    block = stated.read(BLOCK)
    if block is not None and not all(type(side) is int for side in block):
        raise stated.error(BLOCK.name, "not two integers")
    return Quantisation(None if block is None else (block[0], block[1]), static=stated.read(SCHEME))


def dequantise(stored: dict[str, Tensor], config: Fields, dtype: torch.dtype) -> Iterator[str]:
    """Replaces float8 weights that have scales by their values, and removes the scales.

    Args:
        stored: A folder's tensors by name; changed in place.
        config: The content of config.json.
        dtype: Type of the dequantised weights.
    Yields:
        A line for each weight that its scales do not fit.
    Raises:
        UserError: As `read_quantisation`.
    """
    block, static = read_quantisation(config)
    for module in [name.removesuffix(SCALES) for name in stored if name.endswith(SCALES)]:
        name, scale = f"{module}.weight", stored[f"{module}{SCALES}"]
        weight = stored.get(name)
        if weight is None or weight.dtype not in FLOAT8:
            continue  # the caller reports scales without a weight
        if block is None:
            fits, rows, columns = scale.numel() == 1, len(weight), weight.numel()
        else:
            rows, columns = block
            grid = [-(-side // size) for side, size in zip(weight.shape, block, strict=False)]
            fits = weight.dim() == 2 and list(scale.shape) == grid
        if not fits or scale.dtype not in SCALE_TYPES:
            expected = "one scale" if block is None else f"a scale per block of {rows} x {columns}"
            yield (
                f"{module}{SCALES} is {tuple(scale.shape)} of {scale.dtype} for a weight {tuple(weight.shape)}, not "
                f"{expected} ({KEY}.{BLOCK.name} of config.json); choose another folder"
            )
            continue
        values, factors = weight.to(torch.float32), scale.to(torch.float32)
        if scale.numel() == 1:
            values *= factors.flatten()
        else:
            factors = factors.repeat_interleave(rows, 0)[: len(weight)]
            values *= factors.repeat_interleave(columns, 1)[:, : weight.shape[1]]
        stored[name] = values.to(dtype)
        del stored[f"{module}{SCALES}"]
        if static:
            stored.pop(f"{module}{ACTIVATION_SCALE}", None)
