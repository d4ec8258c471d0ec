"""Writes GGUF files: the values of a decoder's header, and tensors in 32, 16 or 8 bits."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from vlm.errors import UserError
from vlm.models.pretrained.architecture import Export
from vlm.models.pretrained.gguf.families import (
    DIVISORS,
    FAMILIES,
    HEAD,
    DecoderConfig,
    convert_to_file,
    list_tensors,
    read_sizes,
)
from vlm.models.pretrained.gguf.file import import_gguf
from vlm.models.pretrained.gguf.header import QUANTISATION
from vlm.nn.position import RotaryPositions

HeaderValue: TypeAlias = str | bool | int | float | list[str] | list[int] | list[float]
TYPES = ("F32", "F16", "Q8_0")
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7}  # numbers of general.file_type
MAX_F16 = 65504.0
# Tensors that llama.cpp's converter keeps in 32 bits although they are matrices.
KEPT = ("position_embd.weight", "v.position_embd.weight")


class Contents(NamedTuple):
    """The content of a file: general.architecture, further values of the header, and tensors by name."""

    architecture: str
    values: Mapping[str, HeaderValue]
    tensors: Mapping[str, Tensor]


def make_decoder(exported: Export) -> Contents:
    """Converts a decoder in Hugging Face's format to values and tensors of a file, without a tokenizer.

    Raises:
        UserError: llama.cpp computes something else for a decoder of this kind; the message names the value.
    """
    config: DecoderConfig = {**exported[0]}
    tensors = exported[1]
    kind = str(config["model_type"])
    if kind not in FAMILIES:
        raise _refuse(f"model_type {kind}", f"has decoders of {', '.join(FAMILIES)} only")
    family, sizes = FAMILIES[kind], read_sizes(config)
    activation, supported = family.activation
    if config.get(activation) not in supported:
        raise _refuse(f"{activation} {config.get(activation)}", f"computes {supported[0]} in {kind}")
    untied = not config["tie_word_embeddings"]
    if untied and HEAD not in family.untied:
        raise _refuse("tie_word_embeddings false", f"always ties the embeddings of {kind}")
    values: dict[str, HeaderValue] = {}
    for key, name in {**family.needed, **family.optional}.items():
        values[f"{kind}.{key}"] = float(config[name]) if name in ("rope_theta", "rms_norm_eps") else config[name]
    if not family.rotary:
        values[f"{kind}.feed_forward_length"] = sizes["hidden"]
        values[f"{kind}.attention.layer_norm_epsilon"] = float(config["layer_norm_epsilon"])
    else:
        values |= {f"{kind}.rope.dimension_count": sizes["head"]}
        values |= {f"{kind}.attention.{part}_length": sizes["head"] for part in ("key", "value")}
    values[f"{kind}.vocab_size"] = sizes["vocab"]
    written = {
        stored.name: convert_to_file(stored, tensors[stored.in_folder], config)
        for stored in list_tensors(config, untied=untied)
    }
    if unused := tensors.keys() - {stored.in_folder for stored in list_tensors(config, untied=untied)}:
        raise _refuse(f"the tensor {min(unused)}", f"has none of its kind in {kind}")
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        values |= {f"{kind}.rope.scaling.type": "linear", f"{kind}.rope.scaling.factor": float(scaling["factor"])}
    elif scaling.get("rope_type") == "llama3":
        if kind != "llama":
            raise _refuse("rope_scaling llama3", f"scales positions so in llama, not in {kind}")
        written[DIVISORS] = _make_divisors(config, sizes["head"])
    return Contents(kind, values, written)


def _make_divisors(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """Returns what the angles of Llama 3's positions are divided by."""
    scaling, base = config["rope_scaling"], config["rope_theta"]
    options = {name: scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor")}
    trained_len = scaling["original_max_position_embeddings"]
    plain = RotaryPositions(head_dim=head_dim, base=base)
    scaled = RotaryPositions(head_dim=head_dim, base=base, scaling="llama3", trained_len=trained_len, **options)
    return plain.frequencies() / scaled.frequencies()


def _refuse(value: str, reason: str) -> UserError:
    return UserError(f"model: its {value} cannot be stored in GGUF, because llama.cpp {reason}; use --to safetensors")


def write_gguf(path: Path, contents: Contents, kind: str) -> None:
    """Writes a file, via a temporary one in the same folder.

    Args:
        kind: Type of matrices, one of TYPES. Rows whose length is no multiple of the blocks of Q8_0 are stored in F16.
    Raises:
        UserError: A weight is too large for 16 bits.
    """
    import numpy as np

    gguf = import_gguf()
    part = path.with_name(f"{path.name}.part")
    writer = gguf.GGUFWriter(None, contents.architecture)
    types = {name: _select_type(name, tensor, kind) for name, tensor in contents.tensors.items()}
    values = {**contents.values, "general.file_type": FILE_TYPES[kind]}
    if "Q8_0" in types.values():
        values["general.quantization_version"] = QUANTISATION
    for key, value in values.items():
        _add_value(writer, key, value)
    for name, tensor in contents.tensors.items():
        number = gguf.GGMLQuantizationType[types[name]]
        block, size = gguf.GGML_QUANT_SIZES[number]
        writer.add_tensor_info(name, [*tensor.shape], np.dtype(np.float32), tensor.numel() // block * size, number)
    try:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in contents.tensors.items():  # one after another, because a converted copy takes memory
            rows = tensor.detach().float().contiguous().numpy()
            writer.write_tensor_data(gguf.quantize(rows, gguf.GGMLQuantizationType[types[name]]))
        writer.close()
        os.replace(part, path)
    finally:
        writer.close()
        part.unlink(missing_ok=True)


def check_range(tensors: Mapping[str, Tensor], kind: str) -> None:
    """Checks that all weights that are stored in 16 bits are in range.

    Raises:
        UserError: One is not.
    """
    for name, tensor in tensors.items():
        if _select_type(name, tensor, kind) == "F16" and (largest := float(tensor.detach().abs().max())) > MAX_F16:
            raise UserError(
                f"--outtype {kind.lower()}: {name} has the weight {largest:g}, too large for 16 bits; use --outtype f32"
            )


def _select_type(name: str, tensor: Tensor, kind: str) -> str:
    if tensor.ndim < 2 or name in KEPT:
        return "F32"
    if kind == "Q8_0" and (tensor.ndim > 2 or tensor.shape[-1] % 32):
        return "F16"
    return kind


def _add_value(writer: Any, key: str, value: HeaderValue) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
