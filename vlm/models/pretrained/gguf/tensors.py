"""Checks and reads the tensors of a GGUF file; the library `gguf` dequantises them to float32."""

import math
from collections.abc import Iterator, Mapping
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
# Tensors outside the layers and those of a layer: their names in a folder, and their sizes.
Table = dict[str, tuple[str, tuple[str, ...]]]
OUTER: Table = {
    "token_embd.weight": ("model.embed_tokens.weight", ("vocab", "width")),
    "output_norm.weight": ("model.norm.weight", ("width",)),
}
HEAD: Table = {"output.weight": ("lm_head.weight", ("vocab", "width"))}  # only if it is not the embedding
LAYER: Table = {
    "attn_norm.weight": ("input_layernorm.weight", ("width",)),
    "attn_q.weight": ("self_attn.q_proj.weight", ("queries", "width")),
    "attn_k.weight": ("self_attn.k_proj.weight", ("keys", "width")),
    "attn_v.weight": ("self_attn.v_proj.weight", ("keys", "width")),
    "attn_output.weight": ("self_attn.o_proj.weight", ("width", "queries")),
    "ffn_norm.weight": ("post_attention_layernorm.weight", ("width",)),
    "ffn_gate.weight": ("mlp.gate_proj.weight", ("hidden", "width")),
    "ffn_up.weight": ("mlp.up_proj.weight", ("hidden", "width")),
    "ffn_down.weight": ("mlp.down_proj.weight", ("width", "hidden")),
}
BIASES: Table = {  # of the queries, keys and values of Qwen2
    "attn_q.bias": ("self_attn.q_proj.bias", ("queries",)),
    "attn_k.bias": ("self_attn.k_proj.bias", ("keys",)),
    "attn_v.bias": ("self_attn.v_proj.bias", ("keys",)),
}


def folder_names(places: Mapping[str, Place], config: Mapping[str, Any]) -> dict[str, str]:
    """The name of each tensor in a folder with this content of config.json.

    Raises:
        ValueError: A tensor is missing, has another shape, or does not belong to the model.
    """
    kind, heads, width = config["model_type"], config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim", width // heads)
    sizes = {"width": width, "vocab": config["vocab_size"], "hidden": config["intermediate_size"]}
    sizes |= {"queries": heads * head_dim, "keys": config.get("num_key_value_heads", heads) * head_dim}
    found: dict[str, str] = {}
    for name, (other, axes) in _expected(places, kind, config["num_hidden_layers"]):
        shape = tuple(sizes[axis] for axis in axes)
        if name not in places:
            raise ValueError(f"it has no tensor {name!r}")
        if places[name].shape != shape:
            raise ValueError(f"the tensor {name!r} is of shape {places[name].shape}, its header states {shape}")
        found[name] = other
    if foreign := next((name for name in places if name not in found), None):
        raise ValueError(f"the tensor {foreign!r:.60} is not one of {kind} with {config['num_hidden_layers']} layers")
    return found


def _expected(places: Mapping[str, Place], kind: str, depth: int) -> Iterator[tuple[str, tuple[str, tuple[str, ...]]]]:
    """Yields the tensors of a model; lazily, because a file may state any number of layers."""
    yield from (OUTER | {name: one for name, one in HEAD.items() if name in places}).items()
    for layer in range(depth):
        for name, (other, axes) in (LAYER | (BIASES if kind == "qwen2" else {})).items():
            yield f"blk.{layer}.{name}", (f"model.layers.{layer}.{other}", axes)


def check_tensors(places: Mapping[str, Place]) -> None:
    """Checks that all tensors have known types and are inside the file.

    Raises:
        ValueError: A tensor has an unknown type or an invalid shape, or is not inside the file.
    """
    sizes = {path: path.stat().st_size for path in {place.path for place in places.values()}}
    kinds = {one.value: one.name for one in _library().GGMLQuantizationType}
    for name, place in places.items():
        if (kind := kinds.get(place.kind, place.kind)) not in TYPES:
            raise ValueError(f"{name!r:.60} is of type {kind}, not one of {', '.join(TYPES)}")
        block, _ = _block(place)
        if not place.shape or place.shape[-1] % block or 0 in place.shape:
            raise ValueError(f"{name!r:.60} is of shape {place.shape}, whose rows are no blocks of {block} numbers")
        if place.start + _bytes(place) > sizes[place.path]:
            raise ValueError(f"{name!r:.60} ends after the file, which is cut short")


def read_tensor(place: Place) -> Tensor:
    """Reads a checked tensor; one that is not quantised is memory-mapped."""
    import numpy as np

    content = np.memmap(place.path, np.uint8, "c", place.start, (_bytes(place),)).view(np.ndarray)
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
