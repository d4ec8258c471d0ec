"""Converts the header of a GGUF file to the files of a tokenizer: of byte pairs, or a SentencePiece model."""

import struct
from collections.abc import Collection, Sequence
from typing import cast

from vlm.models.pretrained.fields import Values
from vlm.models.pretrained.gguf.config import KEY, Json, list_tokens
from vlm.untrusted.sizes import JsonValue

MAX_TOKEN_LENGTH = 1024
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


def make_tokenizer_files(values: Values, rows: int, ends: Collection[int]) -> dict[str, Json | bytes]:
    """Returns the contents of a tokenizer's files by name, with objects for JSON.

    Args:
        values: Values of the header.
        rows: Number of rows of the embedding.
        ends: Tokens that end a generation. They are control tokens, as in llama.cpp, even if the header says otherwise.
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
    if model == "gpt2":
        return {"tokenizer.json": _make_tokenizer_json(values, tokens, kinds)}
    if model == "llama":
        settings = {"add_bos_token": values.get(f"{KEY}add_bos_token", True)}
        return {"tokenizer.model": _encode_sentencepiece(values, tokens, kinds), "tokenizer_config.json": settings}
    raise ValueError(f"{KEY}model is {model!r:.40}, not gpt2 or llama")


def _make_tokenizer_json(values: Values, tokens: Sequence[str], kinds: Sequence[int]) -> Json:
    name = values.get(f"{KEY}pre")
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"{KEY}pre is {name!r:.40}, not one of {', '.join(PRE_TOKENIZERS)}")
    cuts = PRE_TOKENIZERS[name]
    vocab = {token: id for id, token in enumerate(tokens) if kinds[id] != UNUSED}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added: list[Json] = [
        {"id": id, "content": token, "special": kinds[id] != USER_DEFINED, **flags}
        for token, id in vocab.items()
        if kinds[id] in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    merges = [pair.split(" ") for pair in cast(Sequence[str], values[f"{KEY}merges"])]
    if not all(len(pair) == 2 for pair in merges):
        raise ValueError(f"{KEY}merges must be pairs")
    begins = values.get(f"{KEY}add_bos_token", cuts is LLAMA3_SPLITS)
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if cuts is QWEN2_SPLITS else None,
        "pre_tokenizer": cuts[0] if len(cuts) == 1 else {"type": "Sequence", "pretokenizers": cuts},
        "post_processor": _make_bos_processor(tokens, values[f"{KEY}bos_token_id"]) if begins else None,
        "decoder": BYTES | {"use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": cuts is LLAMA3_SPLITS},
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
