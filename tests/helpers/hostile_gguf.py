"""GGUF files that are cut, wrong or made to do harm: who makes each, and words of the refusal."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gguf_files import decoder, save_gguf
from hugging import byte_pairs

TEXT, NUMBER, LIST = 8, 4, 9  # numbers of types


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def header(*entries: bytes, tensors: bytes = b"", counts: tuple[int, int] | None = None, version: int = 3) -> bytes:
    """A file of a few values and no weights."""
    first, second = counts or (0, len(entries))
    return b"GGUF" + struct.pack("<IQQ", version, first, second) + b"".join(entries) + tensors + bytes(64)


def tensor(name: str = "output.weight", axes=(32, 32), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, offset)


def many(kind: int, count: int, content: bytes = b"") -> bytes:
    return entry("a", LIST, struct.pack("<IQ", kind, count) + content)


# Files made of bytes, and words of the message.
RAW: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "it is truncated"),
    "the first word alone": (lambda: b"GGUF", "it is truncated"),
    "a pickle": (lambda: b"\x80\x04cos\nsystem\n(S'touch canary'\ntR.", "is not a GGUF file"),
    "version 1": (lambda: header(version=1), "its version is 1"),
    "the other end first": (lambda: header(version=3 << 24), "it is a big-endian file"),
    "values without end": (lambda: header(counts=(0, 2**63)), "it claims 9,223,372,036,854,775,808 values"),
    "tensors without end": (lambda: header(counts=(2**63, 0)), "it claims 9,223,372,036,854,775,808 values"),
    "a long key": (lambda: header(struct.pack("<Q", 2**63) + b"a"), "it is truncated"),
    "a long text": (lambda: header(entry("a", TEXT, struct.pack("<Q", 2**40))), "it is truncated"),
    "a list of bytes without end": (lambda: header(many(0, 2**62)), "it claims 4,611,686,018,427,387,904"),
    "a list of texts without end": (lambda: header(many(TEXT, 2**40)), "it claims 1,099,511,627,776 values"),
    "as many texts as fit": (lambda: header(many(TEXT, 4 * 10**6, bytes(32 * 10**6))), "it claims 4,000,000 values"),
    "lists in lists": (lambda: header(entry("a", LIST, struct.pack("<IQ", LIST, 1) * 10**5)), "the unknown type 9"),
    "an unknown type": (lambda: header(entry("a", 99, bytes(8))), "the unknown type 99"),
    "a key twice": (lambda: header(*[entry("a", NUMBER, bytes(4))] * 2), "the key 'a' is duplicated"),
    "a key of no text": (lambda: header(text(b"\xff\xfe") + struct.pack("<I", 99)), "type 99"),
    "a tensor twice": (lambda: header(tensors=tensor() * 2, counts=(2, 0)), "is duplicated"),
    "axes without end": (
        lambda: header(tensors=text("a") + struct.pack("<I", 2**31), counts=(1, 0)),
        "2147483648 axes",
    ),
    "a giant tensor": (lambda: header(tensors=tensor(axes=(2**62, 2**62)), counts=(1, 0)), "which is truncated"),
    "a far tensor": (lambda: header(tensors=tensor(offset=2**63), counts=(1, 0)), "which is truncated"),
    "an empty tensor": (lambda: header(tensors=tensor(axes=(0, 2**62)), counts=(1, 0)), "whose rows are not multiples"),
    "rows of half a block": (
        lambda: header(tensors=tensor(axes=(20, 2), kind=8), counts=(1, 0)),
        "rows are not multiples",
    ),
    "an unknown kind": (lambda: header(tensors=tensor(kind=99), counts=(1, 0)), "is of type 99, not one of F32"),
    "another kind": (lambda: header(tensors=tensor(axes=(256, 1), kind=24), counts=(1, 0)), "is of type I8, not"),
    "no alignment": (lambda: header(entry("general.alignment", NUMBER, bytes(4))), "general.alignment is 0"),
    "a far alignment": (lambda: header(entry("general.alignment", 10, struct.pack("<Q", 2**60))), "general.alignment"),
    "nothing said": (lambda: header(), "it has no general.architecture"),
    "an architecture of no text": (lambda: header(entry("general.architecture", NUMBER, bytes(4))), "is 0, not one of"),
    "another architecture": (lambda: header(entry("general.architecture", TEXT, text("mamba"))), "is 'mamba', not one"),
}
NAN, KEY, ROWS = float("nan"), "tokenizer.ggml.", len(byte_pairs(320))
PIECES: dict[str, Any] = {f"{KEY}model": "llama", f"{KEY}merges": None}
# Values that replace those of a good file.
VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "another tokenizer": ({f"{KEY}pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', not one of gpt-2, smollm"),
    "no tokenizer": ({f"{KEY}pre": None}, "tokenizer.ggml.pre is None"),
    "another kind of pieces": ({f"{KEY}model": "t5"}, "tokenizer.ggml.model is 't5', not gpt2 or llama"),
    "no layers": ({"llama.block_count": None}, "it has no llama.block_count"),
    "another scaling": ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn', which is not supported"),
    "partly turned": (
        {"llama.rope.dimension_count": 8},
        "rope.dimension_count is 8, which is not supported; it may be 24",
    ),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count is 8"),
    "a million layers": ({"llama.block_count": 10**6}, "it has no tensor .blk.2.attn_norm.weight"),
    "another layer": ({"llama.block_count": 3}, "it has no tensor .blk.2.attn_norm.weight"),
    "no heads": ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0, not a number above 0"),
    "heads of each layer": ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv is \[2, 1\], not a number"),
    "uneven heads": (
        {"llama.attention.head_count_kv": 3},
        "attn_k.weight. is of shape .48, 64., its header states .72, 64.",
    ),
    "a giant width": (
        {"llama.embedding_length": 2**31},
        "token_embd.weight. is of shape .320, 64., its header states .320, 2147483648.",
    ),
    "a wide MLP": (
        {"llama.feed_forward_length": 2**20},
        "ffn_gate.weight. is of shape .128, 64., its header states .1048576, 64.",
    ),
    "a giant context": ({"llama.context_length": 2**31}, "llama.context_length is 2147483648, not an integer"),
    "a text for a number": ({"llama.block_count": "os.system"}, "llama.block_count is 'os.system', not a number"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": NAN}, "layer_norm_rms_epsilon is nan"),
    "turns backwards": ({"llama.rope.freq_base": -1.0}, "llama.rope.freq_base is -1.0, not a number above 0"),
    "what is not known": ({"llama.attention.clamp_kqv": 1.0}, "clamp_kqv is 1.0, which is not supported; it may be 0"),
    "an end beyond": ({f"{KEY}eos_token_id": 10**6}, "eos_token_id is 1000000, which is outside the vocabulary"),
    "a second end beyond": ({f"{KEY}eot_token_id": 10**6}, "eot_token_id is 1000000, which is outside the vocabulary"),
    "a padding of text": ({f"{KEY}fim_pad_token_id": "end"}, "fim_pad_token_id is 'end', not of type int"),
    "another quantisation": (
        {"general.quantization_version": 1},
        "general.quantization_version is 1, which is not supported",
    ),
    "an adapter": ({"general.type": "adapter"}, "general.type is 'adapter', which is not supported; it may be 'model'"),
    "a key of adapters": ({"adapter.lora.alpha": 16.0}, "adapter.lora.alpha is 16.0, a key that is not supported"),
    "a penalty of some": (
        {"general.sampling.penalty_last_n": 64, "general.sampling.penalty_repeat": 1.1},
        "penalty_last_n is 64",
    ),
    "a share above one": ({"general.sampling.min_p": 2.0}, "general.sampling.min_p is 2.0, not a number from 0 to 1"),
    "a ban beyond": ({f"{KEY}suppress_tokens": [3, 4000]}, "suppress_tokens has 4000, which is outside the voc"),
    "an end that is added": ({f"{KEY}add_eos_token": True}, "add_eos_token is True, which is not supported"),
    "an end of text": ({f"{KEY}eos_token_id": "end"}, "eos_token_id is 'end', not of type int"),
    "no end": (
        {f"{KEY}eos_token_id": None, f"{KEY}tokens": [f"t{id}" for id in range(ROWS)]},
        "it has no tokenizer.ggml.eos_token_id",
    ),
    "a padding beyond": (
        {f"{KEY}padding_token_id": 10**6},
        "padding_token_id is 1000000, which is outside the vocabulary",
    ),
    "a begin beyond": ({f"{KEY}bos_token_id": 10**6, f"{KEY}add_bos_token": True}, "which is outside the vocabulary"),
    "no tokens": ({f"{KEY}tokens": None}, "it has no tokenizer.ggml.tokens"),
    "numbers for tokens": ({f"{KEY}tokens": [*range(ROWS)]}, "tokens must be strings"),
    "one token for all": ({f"{KEY}tokens": "a" * ROWS}, "not of type list"),
    "a token twice": ({f"{KEY}tokens": ["a"] * ROWS}, "has a duplicate token"),
    "few types": ({f"{KEY}token_type": [1, 1]}, "token_type 2, the embedding"),
    "few tokens": ({f"{KEY}tokens": ["a", "b"]}, "tokens has 2 tokens"),
    "a giant token": ({f"{KEY}tokens": [*map(str, range(ROWS - 1)), "a" * 10**7]}, "strings of at most 1,024"),
    "merges of one": ({f"{KEY}merges": ["a"]}, "merges must be pairs"),
    "merges of strangers": ({f"{KEY}merges": ["qqq zzz"]}, "tokenizer in .* cannot be used"),
    "numbers for merges": ({f"{KEY}merges": [1, 2]}, "cannot be read"),
    "no merges": ({f"{KEY}merges": None}, "it has no tokenizer.ggml.merges"),
    "no scores": (PIECES, "it has no tokenizer.ggml.scores"),
    "few scores": (PIECES | {f"{KEY}scores": [0.0]}, "cannot be read"),
}


def replace_bytes(good: bytes, old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new) and old in good
    return good.replace(old, new)


# Changes to the bytes of a good file.
CHANGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut in its header": (lambda good: good[:3000], "it is truncated|it claims"),
    "cut in its weights": (lambda good: good[: len(good) * 3 // 4], "which is truncated"),
    "cut by a byte": (lambda good: good[:-32], "which is truncated"),
    "a tensor of another name": (
        lambda good: replace_bytes(good, b"blk.1.ffn_up.w", b"blk.1.ffn_xx.w"),
        "it has no tensor .blk.1.ffn_up.weight",
    ),
    "a tensor of another layer": (
        lambda good: replace_bytes(good, b"blk.1.ffn_up.w", b"blk.9.ffn_up.w"),
        "it has no tensor .blk.1.ffn_up.weight",
    ),
    "weights that are no numbers": (lambda good: good[:-64] + struct.pack("<f", NAN) * 16, "weights are not finite"),
}


# Values of a part that is not the first, which the first has otherwise.
PARTS = {
    "split.no": (0, "split.no is 0 in a-00002-of-00002.gguf, not 1"),
    "split.count": (5, "split.count is 5 in a-00002-of-00002.gguf, not 2"),
    "split.tensors.count": (99, "split.tensors.count is 99 in a-00002-of-00002.gguf, not 21"),
    "llama.rope.freq_base": (7.0, "llama.rope.freq_base is 7.0 in a-00002-of-00002.gguf, not 100000.0"),
}


def save_parts(path: Path, key: str, value: float) -> None:
    for number in (0, 1):
        values = {"split.no": number, "split.count": 2, "split.tensors.count": 21} | ({key: value} if number else {})

        def keep(tensors: dict[str, Any], number: int = number) -> None:
            for name in [*tensors][number::2]:
                del tensors[name]

        part = path.with_name(f"a-0000{number + 1}-of-00002.gguf")
        save_gguf(part, *decoder("llama"), values=values, change=keep)


def save_scaling(path: Path, numbers: tuple[float, ...]) -> None:
    """Positions that are scaled otherwise than those of Llama 3."""
    save_gguf(path, *decoder("llama3"))
    path.write_bytes(path.read_bytes()[:-32] + struct.pack("<8f", *numbers))
