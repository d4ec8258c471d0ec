"""Reads and checks the header of a GGUF file, which may be split into parts."""

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vlm.errors import UserError

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_BYTES, MOST_VALUES = 2**24, 2**20  # limits of a header; Llama 3, with 128,000 tokens, has 2**23 and 2**19
MOST_AXES, MOST_TENSORS = 4, 2**16
STRING, ARRAY = 8, 9
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}  # type codes, as in `struct`


class Place(NamedTuple):
    """The position of a tensor in its file.

    Args:
        path: The file, or the part of a split file.
        kind: Number of its type.
        shape: Its sizes, rows first.
        start: Offset of its first byte.
    """

    path: Path
    kind: int
    shape: tuple[int, ...]
    start: int


class Header(NamedTuple):
    """The part of a file before the weights."""

    values: dict[str, Any]
    tensors: dict[str, Place]


def read_header(path: Path) -> Header:
    """Reads the header of a file.

    Raises:
        ValueError: It is damaged, or exceeds the limits.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        cursor = _Cursor(file.read(MOST_BYTES))
    if cursor.bytes(4) != MAGIC:
        raise ValueError("it is no GGUF file")
    version = cursor.number("I")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise ValueError("it is a big-endian file; convert it with the command gguf-convert-endian of the library gguf")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}, which is not 2 or 3")
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    values: dict[str, Any] = {}
    for _ in range(cursor.count(keys, 13)):
        key = cursor.text()
        if key in values:
            raise ValueError(f"it has {key!r:.60} twice")
        values[key] = cursor.value(cursor.number("I"))
    places: dict[str, Place] = {}
    for _ in range(min(cursor.count(tensors, 24), MOST_TENSORS)):
        name = cursor.text()
        axes = cursor.number("I")
        if axes > MOST_AXES or name in places:
            raise ValueError(f"the tensor {name!r:.60} has {axes} axes, or is there twice")
        sizes = [cursor.number("Q") for _ in range(axes)]
        places[name] = Place(path, cursor.number("I"), tuple(reversed(sizes)), cursor.number("Q"))
    align = values.get("general.alignment", 32)
    if type(align) is not int or not 8 <= align <= 2**16:
        raise ValueError(f"general.alignment is {align!r:.60}, not a number from 8 to 65536")
    first = math.ceil(cursor.place / align) * align
    return Header(values, {name: one._replace(start=first + one.start) for name, one in places.items()})


class _Cursor:
    """Reads values one after another; raises ValueError at the end."""

    def __init__(self, content: bytes) -> None:
        self.content, self.place, self.left = content, 0, MOST_VALUES

    def bytes(self, count: int) -> bytes:
        start, self.place = self.place, self.place + count
        if self.place > len(self.content):
            raise ValueError("it ends too early, or its header is larger than any real one")
        return self.content[start : self.place]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))[0]

    def count(self, stated: int, least: int) -> int:
        """Checks and returns a number of items that take at least `least` bytes each."""
        self.left -= stated
        if stated * least > len(self.content) - self.place or self.left < 0:
            raise ValueError(f"it states {stated:,} values, more than it holds or any real one has")
        return stated

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int, *, inside: bool = False) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY and not inside:
            kind, stated = self.number("I"), self.number("Q")
            if kind not in NUMBERS:
                return [self.value(kind, inside=True) for _ in range(self.count(stated, 8))]
            code = NUMBERS[kind]
            size = struct.calcsize(f"<{code}")
            return list(struct.unpack(f"<{stated}{code}", self.bytes(self.count(stated, size) * size)))
        if kind not in NUMBERS:
            raise ValueError(f"a value has the type {kind}, which is unknown")
        return self.number(NUMBERS[kind])


PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.ASCII)
PART_NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
MOST_PARTS, NAMED = 1000, 3  # missing parts that are named in a message


def read_parts(path: Path) -> Header:
    """Reads the header of a file; if the file is one part of a model, with the tensors of all parts.

    Raises:
        ValueError: It is damaged, or its parts do not belong together.
        OSError: It cannot be read.
        UserError: A part is missing.
    """
    header = read_header(path)
    count = header.values.get(COUNT, 0)
    if type(count) is not int or not 0 <= count <= MOST_PARTS:
        raise ValueError(f"{COUNT} is {count!r:.40}, not a number of up to {MOST_PARTS:,} parts")
    if count < 2:
        return header
    paths = _part_paths(path, count)
    if missing := [part.name for part in paths if not part.is_file()]:
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise UserError(f"{path}: is one of {count} parts; put {', '.join(missing[:NAMED])}{more} next to it")
    values, places = read_header(paths[0]).values, dict[str, Place]()
    for number, part in enumerate(paths):
        read = read_header(part)
        expected = values | {PART_NUMBER: number, COUNT: count}
        for key in (PART_NUMBER, COUNT, *read.values):
            if (stated := read.values.get(key)) != expected.get(key):
                raise ValueError(f"{key} is {stated!r:.40} in {part.name}, not {expected.get(key)!r:.40}")
        if twice := next((name for name in read.tensors if name in places), None):
            raise ValueError(f"{part.name} has the tensor {twice!r:.60} of another part again")
        places |= read.tensors
    if values.get(TENSORS, len(places)) != len(places):
        raise ValueError(f"{TENSORS} is {values[TENSORS]!r:.40}, but its parts have {len(places)} tensors")
    return Header(values, places)


def _part_paths(path: Path, count: int) -> list[Path]:
    match = PART.fullmatch(path.name)
    if match is None or int(match[3]) != count:
        raise ValueError(
            f"{COUNT} is {count}, but its name does not end with -NNNNN-of-{count:05}.gguf; rename the parts"
        )
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}{match[4]}") for number in range(1, count + 1)]


NUMBER = (int, float)
# Allowed values: a type or a tuple of types for any value of these, or a list of values.
Allowed = type | tuple[type, ...] | list[Any]
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


def check_keys(values: Mapping[str, Any], tensors: Mapping[str, Place], read: Mapping[str, Allowed]) -> None:
    """Checks all keys of a header.

    Args:
        read: Allowed values of further keys of the architecture, which depend on its sizes.
    Raises:
        ValueError: A key is unknown, or its value is not supported.
    """
    kind = values["general.architecture"]
    known = {f"general.{name}": allowed for name, allowed in GENERAL.items()}
    known |= {f"tokenizer.{name}": allowed for name, allowed in TOKENIZER.items()}
    if values.get("tokenizer.ggml.model") != "llama":
        known |= {f"tokenizer.{name}": allowed for name, allowed in BYTE_PAIRS.items()}
    known |= {f"split.{name}": allowed for name, allowed in SPLIT.items()}
    if any(place.kind not in PLAIN_KINDS for place in tensors.values()):
        known["general.quantization_version"] = [QUANTISATION]
    if values.get("general.sampling.penalty_repeat", 1) == 1:
        known["general.sampling.penalty_last_n"] = int
    known |= {f"{kind}.{name}": allowed for name, allowed in (ARCHITECTURE | dict(read)).items()}
    for key, value in values.items():
        if key in known:
            if not _is_allowed(value, known[key]):
                raise ValueError(f"{key} is {value!r:.40}, {_wanted(known[key])}")
        elif not _is_description(key):
            raise ValueError(f"{key} is {value!r:.40}, a key that is not supported")


def _is_allowed(value: Any, allowed: Allowed) -> bool:
    if isinstance(allowed, list):
        return value in allowed
    return type(value) in (allowed if isinstance(allowed, tuple) else (allowed,))


def _wanted(allowed: Allowed) -> str:
    if isinstance(allowed, list):
        return f"which is not supported; it may be {' or '.join(map(repr, allowed))}"
    kinds = allowed if isinstance(allowed, tuple) else (allowed,)
    return f"not of type {' or '.join(kind.__name__ for kind in kinds)}"


def _is_description(key: str) -> bool:
    group, _, name = key.partition(".")
    if group == "tokenizer":
        return name.startswith("chat_template.")  # further templates, for tools for example
    return group in FREE_GROUPS or (group == "general" and name.split(".")[0] in DESCRIPTIONS)
