"""Reads a GGUF file (llama.cpp) like a Hugging Face folder."""

import math
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlm.errors import UserError
from vlm.models.pretrained.fields import Fields
from vlm.models.pretrained.folder import CONFIG, GENERATION, Folder
from vlm.models.pretrained.gguf.config import DIVISORS, OPTION_KEYS, SIZE_KEYS, config_of, find_ends, generation_of
from vlm.models.pretrained.gguf.header import Place, read_parts
from vlm.models.pretrained.gguf.tokenizer import tokenizer_files

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


SUFFIX = ".gguf"
PERMUTED = ("llama",)  # architectures in which the two halves of each head of queries and keys alternate
ROTATED = re.compile(r"\.[qk]_proj\.")


class _HeaderFields(Fields):
    """Fields made from a header; an error names the header's key."""

    def __or__(self, values: Mapping[str, Any]) -> Fields:
        return _HeaderFields({**self.values, **values}, self.file, self.within, self.used)

    def fault(self, name: str, words: str) -> UserError:
        value = " ".join(f"{self.values.get(name)!r:.60}".split())
        kind = self.values.get("model_type")
        key = f"{kind}.{SIZE_KEYS[name]}" if name in SIZE_KEYS else OPTION_KEYS.get(name, name)
        return UserError(f"{self.file}: {key} is {value}, {words}; choose another file")


class GGUF(Folder):
    """A GGUF file, or all parts of a split one; the files of an equivalent folder are created from its header.

    Args:
        path: The file, or any part of a split one.
    Raises:
        UserError: The file is missing, damaged, too large, or not supported.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        try:
            self._header = read_parts(self.path)
            check_tensors(self._header.tensors)
            self._contents = self._made()
        except KeyError as fault:
            raise UserError(f"{self} cannot be read: it has no {fault.args[0]}; choose another file") from fault
        except (AttributeError, OSError, TypeError, ValueError) as fault:
            raise UserError(f"{self} cannot be read: {fault}; choose another file") from fault

    def _made(self) -> dict[str, Any]:
        """The contents of files by name, with objects for JSON."""
        values, places = self._header.values, dict(self._header.tensors)
        divisors = places.pop(DIVISORS, None)
        config = config_of(self._header, None if divisors is None else read_tensor(divisors))
        self._names = folder_names(places, config)
        ends = find_ends(values)
        made: dict[str, Any] = {CONFIG: config, GENERATION: generation_of(values, ends)}
        if (template := values.get("tokenizer.chat_template")) is not None:
            made["chat_template.jinja"] = template.encode()
        return made | tokenizer_files(values, config["vocab_size"], ends)

    @cached_property
    def generation(self) -> Fields:
        return _HeaderFields(self._contents[GENERATION], str(self.path))

    def place(self, name: str) -> str:
        return str(self.path)

    def has(self, name: str) -> bool:
        return name in self._contents

    def bytes(self, name: str) -> "bytes | None":
        return self._contents.get(name)

    def _read_json(self, name: str) -> Fields | None:
        if name not in self._contents:
            return None
        return _HeaderFields(self._contents[name], str(self.path))

    def weights(self, *, mapped: bool = False) -> dict[str, Tensor]:
        try:
            read = {name: read_tensor(self._header.tensors[name]) for name in self._names}
        except (OSError, ValueError) as fault:
            raise UserError(f"{self} cannot be read: {fault}; fetch it again") from fault
        tensors = {self._names[name]: tensor if mapped else tensor.clone() for name, tensor in read.items()}
        if self.config.values["model_type"] in PERMUTED:
            tensors |= {name: self._in_halves(name, tensors[name]) for name in tensors if ROTATED.search(name)}
        return tensors

    def _in_halves(self, name: str, weight: Tensor) -> Tensor:
        """Reorders rows of queries or keys, so that the alternating halves of each head follow one another."""
        stack, config, _ = self.parts["decoder"]
        sizes = stack.arguments(config)
        heads = sizes["num_heads"] if ".q_proj." in name else sizes["num_kv_heads"] or sizes["num_heads"]
        if len(weight) % (2 * heads):
            return weight  # its shape is rejected later
        return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
