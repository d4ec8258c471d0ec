"""Reads and checks the header of a GGUF file, which may be split into parts."""

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vlm.errors import UserError
from vlm.models.pretrained.fields import Values
from vlm.untrusted.sizes import JsonValue

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_BYTES, MAX_VALUES = 2**24, 2**20  # limits of a header; Llama 3, with 128,000 tokens, has 2**23 and 2**19
MAX_AXES, MAX_TENSORS = 4, 2**16
STRING, ARRAY = 8, 9
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # type codes, as in `struct`


class TensorLocation(NamedTuple):
    """The position of a tensor in its file.

    Args:
        path: The file, or the part of a split file.
        kind: Number of its type.
        shape: Its sizes, rows first.
        offset: Offset of its first byte.
    """

    path: Path
    kind: int
    shape: tuple[int, ...]
    offset: int


class Header(NamedTuple):
    """The part of a file before the weights."""

    values: dict[str, Any]
    tensors: dict[str, TensorLocation]


def read_header(path: Path) -> Header:
    """Reads the header of a file.

    Raises:
        ValueError: It is damaged, or exceeds the limits.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        reader = _HeaderReader(file.read(MAX_BYTES))
    if reader.read_bytes(4) != MAGIC:
        raise ValueError("it is not a GGUF file")
    version = reader.read_number("I")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise ValueError("it is a big-endian file; convert it with gguf-convert-endian of the package gguf")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}, which is not 2 or 3")
    tensor_count, key_count = reader.read_number("Q"), reader.read_number("Q")
    values: dict[str, Any] = {}
    for _ in range(reader.check_count(key_count, 13)):
        key = reader.read_text()
        if key in values:
            raise ValueError(f"the key {key!r:.60} is duplicated")
        values[key] = reader.read_value(reader.read_number("I"))
    tensors: dict[str, TensorLocation] = {}
    for _ in range(min(reader.check_count(tensor_count, 24), MAX_TENSORS)):
        name = reader.read_text()
        axes = reader.read_number("I")
        if axes > MAX_AXES or name in tensors:
            raise ValueError(f"the tensor {name!r:.60} has {axes} axes, or is duplicated")
        sizes = [reader.read_number("Q") for _ in range(axes)]
        tensors[name] = TensorLocation(path, reader.read_number("I"), tuple(reversed(sizes)), reader.read_number("Q"))
    align = values.get("general.alignment", 32)
    if type(align) is not int or not 8 <= align <= 2**16:
        raise ValueError(f"general.alignment is {align!r:.60}, not a number from 8 to 65536")
    first = math.ceil(reader.position / align) * align
    return Header(values, {name: tensor._replace(offset=first + tensor.offset) for name, tensor in tensors.items()})


class _HeaderReader:
    """Reads values in sequence; raises ValueError at the end."""

    def __init__(self, content: bytes) -> None:
        self.content, self.position, self.values_remaining = content, 0, MAX_VALUES

    def read_bytes(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if self.position > len(self.content):
            raise ValueError("it is truncated, or its header exceeds the limit")
        return self.content[start : self.position]

    def read_number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.read_bytes(struct.calcsize(f"<{code}")))[0]

    def check_count(self, stated: int, least: int) -> int:
        """Checks and returns a number of items of at least `least` bytes."""
        self.values_remaining -= stated
        if stated * least > len(self.content) - self.position or self.values_remaining < 0:
            raise ValueError(f"it claims {stated:,} values, more than it contains or the limit allows")
        return stated

    def read_text(self) -> str:
        return self.read_bytes(self.read_number("Q")).decode("utf-8", "replace")

    def read_texts(self, count: int) -> list[str]:
        """Reads many texts, such as a vocabulary, without a call for each number and text."""
        content, start, texts = self.content, self.position, []
        for _ in range(count):
            end = start + 8 + int.from_bytes(content[start : start + 8], "little")
            texts.append(content[start + 8 : end].decode("utf-8", "replace"))
            start = end
        self.position = start
        self.read_bytes(0)  # the last end is the greatest: raises if a text ends after the content
        return texts

    def read_value(self, kind: int, *, inside: bool = False) -> Any:
        if kind == STRING:
            return self.read_text()
        if kind == ARRAY and not inside:
            kind, stated = self.read_number("I"), self.read_number("Q")
            if kind == STRING:
                return self.read_texts(self.check_count(stated, 8))
            if kind not in NUMBERS:
                return [self.read_value(kind, inside=True) for _ in range(self.check_count(stated, 8))]
            code = NUMBERS[kind]
            size = struct.calcsize(f"<{code}")
            return list(struct.unpack(f"<{stated}{code}", self.read_bytes(self.check_count(stated, size) * size)))
        if kind not in NUMBERS:
            raise ValueError(f"a value has the unknown type {kind}")
        return self.read_number(NUMBERS[kind])


PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.ASCII)
PART_NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
MAX_PARTS, MAX_NAMED = 1000, 3  # the latter: missing parts that a message names


def read_parts(path: Path) -> Header:
    """Reads the header of a file; if the file is one part of a model, with the tensors of all parts.

    Raises:
        ValueError: It is damaged, or its parts do not belong together.
        OSError: It cannot be read.
        UserError: A part is missing.
    """
    header = read_header(path)
    count = header.values.get(COUNT, 0)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise ValueError(f"{COUNT} is {count!r:.40}, not a number of up to {MAX_PARTS:,} parts")
    if count < 2:
        return header
    match = PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ValueError(
            f"{COUNT} is {count}, but its name does not end with -NNNNN-of-{count:05}.gguf; rename the parts"
        )
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}{match[4]}") for number in range(1, count + 1)]
    if missing := [part.name for part in paths if not part.is_file()]:
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        raise UserError(f"{path}: is one of {count} parts; put {', '.join(missing[:MAX_NAMED])}{more} next to it")
    values, tensors = read_header(paths[0]).values, dict[str, TensorLocation]()
    for number, part in enumerate(paths):
        read = read_header(part)
        expected = values | {PART_NUMBER: number, COUNT: count}
        for key in (PART_NUMBER, COUNT, *read.values):
            if (stated := read.values.get(key)) != expected.get(key):
                raise ValueError(f"{key} is {stated!r:.40} in {part.name}, not {expected.get(key)!r:.40}")
        if duplicate := next((name for name in read.tensors if name in tensors), None):
            raise ValueError(f"{part.name} duplicates the tensor {duplicate!r:.60} of another part")
        tensors |= read.tensors
    if values.get(TENSORS, len(tensors)) != len(tensors):
        raise ValueError(f"{TENSORS} is {values[TENSORS]!r:.40}, but its parts have {len(tensors)} tensors")
    return Header(values, tensors)


def round_float(value: float) -> float:
    """Returns a 32-bit float of a header with the seven digits that it has."""
    return float(f"{value:.7g}")


NUMBER = (int, float)
# Allowed values: a type or a tuple of types for any value of these, or a list of values.
Allowed = type | tuple[type, ...] | list[JsonValue]
TOKENIZER_IDS = (
    *("bos", "eos", "eot", "eom", "padding", "unknown", "seperator", "cls", "mask", "prefix", "suffix", "middle"),
    *("fim_pad", "fim_rep", "fim_sep", "fim_pre", "fim_suf", "fim_mid"),
)
GENERAL: dict[str, Allowed] = {
    "architecture": str,
    "type": ["model"],
    "alignment": int,
    "file_type": int,
    "quantization_version": int,  # compared with the types of tensors
    "sampling.temp": NUMBER,
    "sampling.top_k": int,
    "sampling.top_p": NUMBER,
    "sampling.min_p": NUMBER,
    "sampling.penalty_repeat": NUMBER,
    "sampling.penalty_last_n": [-1],
    "sampling.xtc_probability": [0],
    "sampling.xtc_threshold": NUMBER,
    "sampling.mirostat": [0],
    "sampling.mirostat_tau": NUMBER,
    "sampling.mirostat_eta": NUMBER,
}
TOKENIZER: dict[str, Allowed] = {
    "ggml.model": str,
    "ggml.pre": str,
    "ggml.tokens": list,
    "ggml.token_type": list,
    "ggml.token_type_count": int,  # of BERT
    "ggml.scores": list,
    "ggml.merges": list,
    **{f"ggml.{name}_token_id": int for name in TOKENIZER_IDS},
    "ggml.add_bos_token": bool,
    "ggml.add_eos_token": [False],
    "ggml.add_sep_token": [False],
    "ggml.add_space_prefix": bool,
    "ggml.remove_extra_whitespaces": bool,
    "ggml.suppress_tokens": list,
    "ggml.normalizer.lowercase": [False],
    "ggml.normalizer.strip_accents": [False],
    "chat_template": str,
    "chat_templates": list,  # names of further templates
    "huggingface.json": str,  # a copy of the tokenizer
}
BYTE_PAIRS: dict[str, Allowed] = {"ggml.add_space_prefix": [False], "ggml.remove_extra_whitespaces": [False]}
SPLIT: dict[str, Allowed] = dict.fromkeys(("no", "count", "tensors.count"), int)
# Keys of the architecture that change nothing.
ARCHITECTURE: dict[str, Allowed] = {
    "attention.causal": [True],
    "attention.sliding_window": [0],
    "attention.clamp_kqv": [0],
    "attention.max_alibi_bias": [0],
    "attention.shared_kv_layers": [0],
    "attn_logit_softcapping": [0],
    "final_logit_softcapping": [0],
    "expert_count": [0],
    "expert_used_count": [0],
    "expert_shared_count": [0],
    "expert_group_count": [0],
    "expert_group_used_count": [0],
    "nextn_predict_layers": [0],
    "pooling_type": [0],
    "use_parallel_residual": [False],
    "tensor_data_layout": ["Meta AI original pth"],
    "rope.scaling.attn_factor": [1],
    "rope.scaling.yarn_attn_factor": [1],
    "rope.scaling.yarn_log_multiplier": [0],
    # How a model was trained, and settings of a scaling (YaRN) that is refused by its type.
    "rope.scaling.finetuned": bool,
    "rope.scaling.original_context_length": int,
    "rope.scaling.yarn_beta_fast": NUMBER,
    "rope.scaling.yarn_beta_slow": NUMBER,
}
# Where a model comes from and how it was quantised: texts for people.
DESCRIPTIONS = (
    *("name", "author", "version", "organization", "finetune", "basename", "description", "quantized_by"),
    *("size_label", "license", "url", "doi", "uuid", "repo_url", "source", "base_model", "dataset", "datasets"),
    *("tags", "languages", "parameter_count"),
)
FREE_GROUPS = ("quantize", "imatrix", "mradermacher")
QUANTISATION = 2  # version of the types of tensors; older ones have the same names and other bytes
PLAIN_KINDS = (0, 1, 30)  # numbers of F32, F16, BF16


def check_keys(values: Values, tensors: Mapping[str, TensorLocation], read: Mapping[str, Allowed]) -> None:
    """Checks all keys of a header.

    Args:
        read: Allowed values of further keys of the architecture, which depend on its sizes.
    Raises:
        ValueError: A key is unknown, or its value is not supported.
    """
    kind = values["general.architecture"]
    supported = {f"general.{name}": allowed for name, allowed in GENERAL.items()}
    supported |= {f"tokenizer.{name}": allowed for name, allowed in TOKENIZER.items()}
    if values.get("tokenizer.ggml.model") != "llama":
        supported |= {f"tokenizer.{name}": allowed for name, allowed in BYTE_PAIRS.items()}
    supported |= {f"split.{name}": allowed for name, allowed in SPLIT.items()}
    if any(location.kind not in PLAIN_KINDS for location in tensors.values()):
        supported["general.quantization_version"] = [QUANTISATION]
    if values.get("general.sampling.penalty_repeat", 1) == 1:
        supported["general.sampling.penalty_last_n"] = int
    supported |= {f"{kind}.{name}": allowed for name, allowed in (ARCHITECTURE | dict(read)).items()}
    _check_supported(values, supported)


def check_values(values: Values, tensors: Mapping[str, TensorLocation], read: Mapping[str, Allowed]) -> None:
    """Checks all keys of a file without a tokenizer.

    Args:
        read: Allowed values of keys besides those about the file itself.
    Raises:
        ValueError: A key is unknown, or its value is not supported.
    """
    supported = {f"general.{name}": allowed for name, allowed in GENERAL.items()}
    if any(location.kind not in PLAIN_KINDS for location in tensors.values()):
        supported["general.quantization_version"] = [QUANTISATION]
    _check_supported(values, supported | dict(read))


def _check_supported(values: Values, supported: Mapping[str, Allowed]) -> None:
    for key, value in values.items():
        allowed, stated = supported.get(key), f"{key} is {value!r:.40}"
        if allowed is None:
            group, _, name = key.partition(".")
            if group == "tokenizer":
                is_free = name.startswith("chat_template.")  # further templates, for tools for example
            else:
                is_free = group in FREE_GROUPS or (group == "general" and name.split(".")[0] in DESCRIPTIONS)
            if not is_free:
                raise ValueError(f"{stated}, a key that is not supported")
        elif isinstance(allowed, list):
            if value not in allowed:
                raise ValueError(f"{stated}, which is not supported; it may be {' or '.join(map(repr, allowed))}")
        elif type(value) not in (kinds := allowed if isinstance(allowed, tuple) else (allowed,)):
            raise ValueError(f"{stated}, not of type {' or '.join(kind.__name__ for kind in kinds)}")
