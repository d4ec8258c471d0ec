"""Converts the header of a GGUF file to the files of a folder: configs and a tokenizer."""

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from vlm.models.pretrained.fields import Values
from vlm.models.pretrained.gguf.families import DIVISORS, EMBEDDING, FAMILIES, HEAD, DecoderConfig
from vlm.models.pretrained.gguf.header import NUMBER, Allowed, Header, check_keys, round_float
from vlm.nn.position import RotaryPositions
from vlm.untrusted.sizes import JsonValue

Json: TypeAlias = dict[str, JsonValue]  # an object of a file that is created here
FACTORS, LARGEST_FACTOR = ("scaling.factor", "scale_linear"), 10_000
# The scaling of all sizes of Llama 3; a GGUF file has it as divisors of the angles of positions.
ORIGINAL_MAX_LEN = 8192
LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR = 1.0, 4.0


def make_config(header: Header, divisors: Tensor | None) -> DecoderConfig:
    """Converts a header to the content of config.json.

    Args:
        divisors: Tensor of divisors of the angles of positions, if there is one.
    Raises:
        KeyError: A value is missing.
        ValueError: The model is not supported.
    """
    kind = header.values["general.architecture"]
    if kind not in FAMILIES:
        raise ValueError(f"general.architecture is {kind!r:.40}, not one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    sizes: DecoderConfig = {theirs: _read_size(header.values, f"{kind}.{key}") for key, theirs in family.needed.items()}
    optional = {theirs: f"{kind}.{key}" for key, theirs in family.optional.items() if f"{kind}.{key}" in header.values}
    sizes |= {theirs: _read_size(header.values, key) for theirs, key in optional.items()}
    width, _, _, heads, *_ = sizes.values()
    head_dim = sizes.get("head_dim", width // heads)
    if "head_dim" in family.optional.values():
        sizes["head_dim"] = head_dim
    rows, *_ = header.tensors[EMBEDDING].shape or (0,)
    allowed: dict[str, Allowed] = {"attention.key_length": [head_dim], "attention.value_length": [head_dim]}
    allowed |= dict.fromkeys((*family.needed, *family.optional), (int, float, list))  # by name after `kind`
    allowed |= {"vocab_size": [rows], "embedding_length_out": [width]}
    if family.rotary:
        allowed |= {"rope.dimension_count": [head_dim], "rope.scaling.type": ["none", "linear"]}
        allowed |= {f"rope.{name}": NUMBER for name in FACTORS}
    else:
        allowed |= {"attention.head_count_kv": [heads], "rope.dimension_count": [head_dim]}
    check_keys(header.values, header.tensors, allowed)
    if head_dim % 2 and family.rotary:
        raise ValueError(f"{kind}.attention.key_length is {head_dim}, but rotary positions need an even number")
    activation, values = family.activation
    sizes |= {
        "model_type": kind,
        "architectures": [family.saved_as],
        "vocab_size": rows,
        # Some files of GPT-2 have a copy of the embedding, which is compared with it when the weights are read.
        "tie_word_embeddings": HEAD not in header.tensors or not family.rotary,
        activation: values[0],
    }
    if family.rotary:
        base = sizes.setdefault("rope_theta", 10_000.0)
        sizes["rope_scaling"] = _read_scaling(header.values, kind, divisors, head_dim, base)
    elif divisors is not None:
        raise ValueError(f"the tensor {DIVISORS!r} is not one of {kind}")
    return sizes


def _read_size(values: Values, key: str) -> int | float:
    """Reads a number above 0; a list of one equal number per layer counts as that number."""
    value: Any = values[key]
    if isinstance(value, list) and value:
        layers: Any = values.get(f"{key.split('.')[0]}.block_count", 0)
        value = value[0] if value == [value[0]] * layers else value
    kinds = (int, float) if key.endswith(("epsilon", "freq_base")) else (int,)
    if type(value) not in kinds or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r:.40}, not a number above 0")
    return round_float(value) if isinstance(value, float) else value


def _read_scaling(values: Values, kind: str, divisors: Tensor | None, head_dim: int, base: float) -> Json | None:
    """Returns linear scaling, the default if a file states a factor, or Llama 3's; None without scaling."""
    key = next((f"{kind}.rope.{name}" for name in FACTORS if f"{kind}.rope.{name}" in values), "")
    factor: Any = values.get(key) or 1
    if values.get(f"{kind}.rope.scaling.type") == "none":
        factor = 1
    if not 1 <= factor <= LARGEST_FACTOR or (divisors is not None and factor != 1):
        contradiction = f" and no {DIVISORS}" if divisors is not None else ""
        raise ValueError(f"{key} is {factor!r:.40}, not a number from 1 to {LARGEST_FACTOR:,}{contradiction}")
    if divisors is not None and kind != "llama":
        raise ValueError(f"the tensor {DIVISORS!r} is not one of {kind}")
    if divisors is not None:
        return _detect_llama3_scaling(divisors, head_dim, base)
    return None if factor == 1 else {"rope_type": "linear", "factor": factor}


def _detect_llama3_scaling(divisors: Tensor, head_dim: int, base: float) -> Json:
    """Returns Llama 3's scaling; raises ValueError if the divisors differ from it."""
    factor = float(divisors.max())
    if divisors.shape == (head_dim // 2,) and 1 <= factor < math.inf:
        low, high = LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR
        plain = RotaryPositions(head_dim=head_dim, base=base)
        scaled = RotaryPositions(
            head_dim=head_dim, base=base, scaling="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high
        )
        if torch.allclose(plain.frequencies() / scaled.frequencies(), divisors.float(), rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "original_max_position_embeddings": ORIGINAL_MAX_LEN,
                "low_freq_factor": low,
                "high_freq_factor": high,
            }
    raise ValueError(f"{DIVISORS} does not scale positions as Llama 3 does")


KEY = "tokenizer.ggml."
NAMED_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
IDS = {"bos_token_id": "bos_token_id", "padding_token_id": "pad_token_id"}  # names in generation_config.json
SUPPRESSED = f"{KEY}suppress_tokens"
# Options of generation_config.json, and the keys that the converter of llama.cpp makes of them.
OPTION_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
SENTENCE_PIECE_IDS = {"bos_token_id": 1, "eos_token_id": 2}  # llama.cpp's defaults for tokenizer.ggml.model = llama
# Texts of tokens that llama.cpp ends a generation at, whether the header names them or not. The lists and their
# exceptions are those of llama.cpp as llama-cpp-python 0.3.36 ships it (src/llama-vocab.cpp).
END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
# Tokens of fill-in-the-middle models: llama.cpp uses the token that the header names, or else one with such a text.
INFILL_ENDS = {
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
# A text does not end a generation if the ends include one of each group: {text: alternatives of groups}.
NOT_ENDS: dict[str, tuple[tuple[set[str], ...], ...]] = {
    "<|end|>": (({"<|return|>"}, {"<|call|>", "<|calls|>"}), ({"<|call|>", "<|calls|>"}, {"<|flush|>"})),
    "</s>": (({"<|tool_response>", "<|plamo:eos|>"},),),
}


def find_ends(values: Values) -> list[int]:
    """Returns the tokens that end a generation: those that the header names first, then those with a known text.

    Raises:
        KeyError: The header has no end token.
        ValueError: An id is not in the vocabulary.
    """
    tokens = list_tokens(values)
    ids = {token: id for id, token in enumerate(tokens) if isinstance(token, str)}
    named = [read_token_id(values, name) for name in NAMED_ENDS]
    for name, texts in INFILL_ENDS.items():
        inferred = min((ids[text] for text in texts if text in ids), default=None)
        named.append(inferred if (stated := read_token_id(values, name)) is None else stated)
    ends = [*named, *sorted(ids[text] for text in END_TEXTS if text in ids)]
    end_ids = list(dict.fromkeys(end for end in ends if end is not None))
    end_texts = {tokens[end] for end in end_ids}
    for text, alternatives in NOT_ENDS.items():
        if text in end_texts and any(all(end_texts & group for group in groups) for groups in alternatives):
            end_ids = [end for end in end_ids if tokens[end] != text]
    if not end_ids:
        raise KeyError(f"{KEY}eos_token_id")
    return end_ids


def list_tokens(values: Values) -> Sequence[str]:
    """Returns the texts of all tokens; `make_tokenizer_files` checks that they are strings."""
    return cast(Sequence[str], values[f"{KEY}tokens"])


def read_token_id(values: Values, name: str) -> int | None:
    """Reads the id of a special token; None if the header has none.

    Raises:
        ValueError: It is not in the vocabulary.
    """
    default = SENTENCE_PIECE_IDS.get(name) if values.get(f"{KEY}model") == "llama" else None
    id = values.get(f"{KEY}{name}", default)
    if id is not None and (type(id) is not int or not 0 <= id < len(list_tokens(values))):
        raise ValueError(f"{KEY}{name} is {id!r:.40}, which is outside the vocabulary")
    return id


def make_generation_config(values: Values, ends: Sequence[int]) -> Json:
    """Converts a header to the content of generation_config.json.

    Raises:
        ValueError: An id is not in the vocabulary.
    """
    options: Json = {"eos_token_id": [*ends]}
    options |= {theirs: read_token_id(values, name) for name, theirs in IDS.items()}
    for name, key in OPTION_KEYS.items():
        if key in values:
            value = values[key]
            options[name] = round_float(value) if isinstance(value, float) else value
    suppressed = cast(Sequence[int], values.get(SUPPRESSED, ()))
    if outside := [id for id in suppressed if id not in range(len(list_tokens(values)))]:
        raise ValueError(f"{SUPPRESSED} has {outside[0]!r:.40}, which is outside the vocabulary")
    return options | {"bad_words_ids": [[id] for id in suppressed]}


SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # names in folders and in headers
MAX_TOKEN_LENGTH, SPACE = 1024, "\u2581"  # the latter marks a space in pieces of SentencePiece
# Kinds of tokens, with SentencePiece's numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
BYTES: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
GPT2_SPLITS: list[Json] = [{**BYTES, "use_regex": True}]
DIGITS: Json = {"type": "Digits", "individual_digits": True}
SMOLLM_SPLITS = [DIGITS, *GPT2_SPLITS]
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _make_pre_tokenizers(numbers: str) -> list[Json]:
    pattern = {"Regex": f"{_WORDS}{numbers}{_REST}"}
    split: Json = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return [split, {**BYTES, "use_regex": False}]


LLAMA3_SPLITS, QWEN2_SPLITS = _make_pre_tokenizers(r"\p{N}{1,3}"), _make_pre_tokenizers(r"\p{N}")
# Pre-tokenizers of BPE, by the name in tokenizer.ggml.pre; those of one line have the same patterns in llama.cpp.
PRE_TOKENIZERS: dict[str, list[Json]] = {
    "gpt-2": GPT2_SPLITS,
    **dict.fromkeys(("smollm", "refact", "starcoder"), SMOLLM_SPLITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), LLAMA3_SPLITS),
    "smaug-bpe": [*LLAMA3_SPLITS],  # a copy: not `is LLAMA3_SPLITS`, so no begin token, and merges are not ignored
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2_SPLITS),
}


def make_tokenizer_files(
    values: Values, rows: int, ends: Collection[int], *, marked: bool = False
) -> dict[str, Json | bytes]:
    """Returns the contents of a tokenizer's files by name, with objects for JSON.

    Args:
        values: Values of the header.
        rows: Number of rows of the embedding.
        ends: Tokens that end a generation. They are control tokens, as in llama.cpp, even if the header says otherwise.
        marked: Whether texts may contain special tokens, as prompts with images do. They need a tokenizer.json.
    Raises:
        ValueError: The tokenizer is damaged or of an unknown kind.
        KeyError: A value is missing.
    """
    tokens = list_tokens(values)
    kinds = cast(Sequence[int], values.get(f"{KEY}token_type") or [NORMAL] * len(tokens))
    if len(tokens) != rows or len(kinds) != rows:
        raise ValueError(
            f"{KEY}tokens has {len(tokens):,} tokens, token_type {len(kinds):,}, the embedding {rows:,} rows"
        )
    if not all(isinstance(token, str) and len(token) <= MAX_TOKEN_LENGTH for token in tokens):
        raise ValueError(f"{KEY}tokens must be strings of at most {MAX_TOKEN_LENGTH:,} characters")
    kinds = [CONTROL if id in ends else kind for id, kind in enumerate(kinds)]
    used = [token for token, kind in zip(tokens, kinds, strict=True) if kind != UNUSED]
    if len(set(used)) < len(used):
        raise ValueError(f"{KEY}tokens has a duplicate token")
    model = values[f"{KEY}model"]
    ids = {f"{name}_token": read_token_id(values, f"{key}_token_id") for name, key in SPECIAL_TOKENS.items()}
    settings: Json = {name: tokens[id] for name, id in ids.items() if id is not None}  # which chat templates write
    if model == "gpt2":
        return {"tokenizer.json": _make_tokenizer_json(values, tokens, kinds), "tokenizer_config.json": settings}
    settings["add_bos_token"] = values.get(f"{KEY}add_bos_token", True)
    if model == "llama" and marked:
        return {"tokenizer.json": _make_pieces_json(values, tokens, kinds), "tokenizer_config.json": settings}
    if model == "llama":
        return {"tokenizer.model": _encode_sentencepiece(values, tokens, kinds), "tokenizer_config.json": settings}
    raise ValueError(f"{KEY}model is {model!r:.40}, not gpt2 or llama")


def _make_tokenizer_json(values: Values, tokens: Sequence[str], kinds: Sequence[int]) -> Json:
    name = values.get(f"{KEY}pre")
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"{KEY}pre is {name!r:.40}, not one of {', '.join(PRE_TOKENIZERS)}")
    cuts = PRE_TOKENIZERS[name]
    vocab = {token: id for id, token in enumerate(tokens) if kinds[id] != UNUSED}
    merges = [pair.split(" ") for pair in cast(Sequence[str], values[f"{KEY}merges"])]
    if not all(len(pair) == 2 for pair in merges):
        raise ValueError(f"{KEY}merges must be pairs")
    begins = values.get(f"{KEY}add_bos_token", cuts is LLAMA3_SPLITS)
    return {
        "version": "1.0",
        "added_tokens": _list_added_tokens(vocab, kinds),
        "normalizer": {"type": "NFC"} if cuts is QWEN2_SPLITS else None,
        "pre_tokenizer": cuts[0] if len(cuts) == 1 else {"type": "Sequence", "pretokenizers": cuts},
        "post_processor": _make_bos_processor(tokens, values[f"{KEY}bos_token_id"]) if begins else None,
        "decoder": BYTES | {"use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": cuts is LLAMA3_SPLITS},
    }


def _list_added_tokens(vocab: Mapping[str, int], kinds: Sequence[int]) -> list[Json]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": id, "content": token, "special": kinds[id] != USER_DEFINED, **flags}
        for token, id in vocab.items()
        if kinds[id] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]


def _make_pieces_json(values: Values, tokens: Sequence[str], kinds: Sequence[int]) -> Json:
    """Returns a tokenizer.json of pieces with scores: their merges in the order of the scores, as transformers does."""
    vocab = {token: id for id, token in enumerate(tokens) if kinds[id] != UNUSED}
    scores = cast(Sequence[float], values[f"{KEY}scores"])
    pieces = [(token, id) for token, id in vocab.items() if kinds[id] in (NORMAL, USER_DEFINED)]
    pieces.sort(key=lambda piece: -scores[piece[1]])
    halves = ((token[:at], token[at:]) for token, _ in pieces for at in range(1, len(token)))
    replace: Json = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix: Json = {"type": "Prepend", "prepend": SPACE}
    prefixed = values.get(f"{KEY}add_space_prefix", True)
    back: list[Json] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    back += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    begins = values.get(f"{KEY}add_bos_token", True)
    return {
        "version": "1.0",
        "added_tokens": _list_added_tokens(vocab, kinds),
        "normalizer": {"type": "Sequence", "normalizers": [prefix, replace]} if prefixed else replace,
        "pre_tokenizer": None,
        "post_processor": _make_bos_processor(tokens, read_token_id(values, "bos_token_id")) if begins else None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {
            "type": "BPE",
            "unk_token": next((token for token, id in vocab.items() if kinds[id] == UNKNOWN), None),
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": [[left, right] for left, right in halves if left in vocab and right in vocab],
        },
    }


def _make_bos_processor(tokens: Sequence[str], id: JsonValue) -> Json:
    """Returns a post-processor that adds a begin token to a text."""
    if type(id) is not int or not 0 <= id < len(tokens):
        raise ValueError(f"{KEY}bos_token_id is {id!r:.40}, which is outside the vocabulary")
    token = tokens[id]
    texts: list[Json] = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": token, "type_id": 0}}, texts[0]],
        "pair": texts,
        "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}},
    }


def _encode_sentencepiece(values: Values, tokens: Sequence[str], kinds: Sequence[int]) -> bytes:
    """Encodes a SentencePiece file (sentencepiece_model.proto): pieces and normalisation."""
    pieces = b"".join(
        _encode_bytes(
            1, _encode_bytes(1, token.encode()) + b"\x15" + struct.pack("<f", score) + _encode_integer(3, kind)
        )
        for token, score, kind in zip(tokens, cast(Sequence[float], values[f"{KEY}scores"]), kinds, strict=True)
    )
    trainer = _encode_integer(3, 2) + _encode_integer(35, 1)  # BPE with byte fallback
    spaces = (values.get(f"{KEY}add_space_prefix", True), values.get(f"{KEY}remove_extra_whitespaces", False), True)
    flags = b"".join(_encode_integer(field, int(cast(bool, flag))) for field, flag in enumerate(spaces, 3))
    normalizer = _encode_bytes(1, b"identity") + flags
    return pieces + _encode_bytes(2, trainer) + _encode_bytes(3, normalizer)


def _encode_integer(field: int, value: int) -> bytes:
    return _encode_varint(field << 3) + _encode_varint(value)


def _encode_bytes(field: int, content: bytes) -> bytes:
    return _encode_varint(field << 3 | 2) + _encode_varint(len(content)) + content


def _encode_varint(value: int) -> bytes:
    """Encodes an integer as a protocol buffer does, with seven bits per byte."""
    if not 0 <= value < 2**31:
        raise ValueError(f"{value} is out of bounds")
    low = bytearray()
    while value > 127:
        low.append(value & 127 | 128)
        value >>= 7
    return bytes([*low, value])
