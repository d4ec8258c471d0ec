"""Converts tokenizers of Hugging Face to the values of a GGUF header; the inverse of `config.make_tokenizer_files`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlm.models.pretrained.gguf.config import (
    CONTROL,
    KEY,
    NORMAL,
    PRE_TOKENIZERS,
    QWEN2_SPLITS,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Json,
)
from vlm.models.pretrained.gguf.write import HeaderValue

BYTE = 6  # number of bytes in SentencePiece
BYTE_TEXTS = {f"<0x{byte:02X}>" for byte in range(256)}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
PREFIXED_SPACES = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, SPACES]}
# Cuts nothing, because the normaliser has replaced the spaces.
NO_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
MERGES_REASON = "its merges are not those of a SentencePiece model"


def make_json_vocabulary(content: Mapping[str, Any], rows: int, *, begins: bool) -> dict[str, HeaderValue]:
    """Converts a tokenizer.json: byte-level BPE, or BPE over SentencePiece's marks of spaces.

    Args:
        content: The content of tokenizer.json.
        rows: Number of rows of the embedding; those without a piece are unused.
        begins: Whether texts begin with the begin token.
    Raises:
        ValueError: llama.cpp has no such tokenizer; the message names the part.
    """
    model = content["model"]
    if model.get("type") != "BPE":
        raise ValueError(f"its model is {model.get('type')}, not BPE")
    tokens, kinds = _list_tokens(content, rows)
    values: dict[str, HeaderValue] = {f"{KEY}tokens": tokens, f"{KEY}add_bos_token": begins}
    merges = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in model["merges"]]
    if model.get("byte_fallback"):
        values |= _make_pieces(content, tokens, kinds, merges)
    else:
        values |= {f"{KEY}model": "gpt2", f"{KEY}pre": _find_pre_tokenizer(content)}
        values |= {f"{KEY}merges": [" ".join(pair) for pair in merges]}
    return values | {f"{KEY}token_type": kinds}


def _list_tokens(content: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Returns the text and the kind of each id."""
    vocab: Mapping[str, int] = content["model"]["vocab"]
    tokens, kinds = [f"[PAD{id}]" for id in range(rows)], [UNUSED] * rows
    for token, id in vocab.items():
        tokens[id], kinds[id] = token, NORMAL
    for token in content.get("added_tokens") or ():
        tokens[token["id"]], kinds[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    if (unknown := content["model"].get("unk_token")) in vocab:
        kinds[vocab[unknown]] = UNKNOWN
    return tokens, kinds


def _find_pre_tokenizer(content: Mapping[str, Any]) -> str:
    """Finds the name of a pre-tokenizer in llama.cpp.

    Raises:
        ValueError: There is none.
    """
    stated = content.get("pre_tokenizer") or {}
    parts = _strip_neutral(stated.get("pretokenizers", [stated]))
    normalizer = content.get("normalizer")
    for name, splits in PRE_TOKENIZERS.items():
        expected = {"type": "NFC"} if splits is QWEN2_SPLITS else None
        ignores = name in ("llama-bpe", "llama3", "llama-v3")
        if (parts, normalizer) == (_strip_neutral(splits), expected) and ignores == bool(
            content["model"].get("ignore_merges")
        ):
            return name
    raise ValueError("llama.cpp has no pre-tokenizer that cuts texts as its pre_tokenizer and normalizer do")


def _strip_neutral(parts: Sequence[Json]) -> list[Json]:
    """Returns pre-tokenizers without the option that changes offsets only."""
    return [{name: value for name, value in part.items() if name != "trim_offsets"} for part in parts]


def _make_pieces(
    content: Mapping[str, Any], tokens: Sequence[str], kinds: list[int], merges: Sequence[Sequence[str]]
) -> dict[str, HeaderValue]:
    """Returns the values of pieces with scores, which order merges as their list does; marks bytes in `kinds`.

    Raises:
        ValueError: Scores cannot express the merges, or the normalizer is another than SentencePiece's.
    """
    normalizer, pre_tokenizer = content.get("normalizer"), content.get("pre_tokenizer")
    if normalizer not in (SPACES, PREFIXED_SPACES) or pre_tokenizer not in (None, NO_SPLIT):
        raise ValueError("llama.cpp has no pre-tokenizer that cuts texts as its pre_tokenizer and normalizer do")
    for id, token in enumerate(tokens):
        if token in BYTE_TEXTS:
            kinds[id] = BYTE
    pairs = {(left, right) for left, right in merges}
    order = list(dict.fromkeys(left + right for left, right in merges))
    if len([1 for at, (a, b) in enumerate(merges) if at == 0 or a + b != "".join(merges[at - 1])]) != len(order):
        raise ValueError(MERGES_REASON)
    vocab = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (NORMAL, USER_DEFINED)}
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == NORMAL:
            halves = ((token[:at], token[at:]) for at in range(1, len(token)))
            if any(left in vocab and right in vocab and (left, right) not in pairs for left, right in halves):
                raise ValueError(f"{MERGES_REASON}: it does not merge {token!r:.40} from all pairs of its pieces")
    ranks = {piece: rank for rank, piece in enumerate(order)}
    scores = [-float(ranks.get(token, len(order))) for token in tokens]
    return {
        f"{KEY}model": "llama",
        f"{KEY}pre": "default",
        f"{KEY}scores": scores,
        f"{KEY}add_space_prefix": normalizer == PREFIXED_SPACES,
        f"{KEY}remove_extra_whitespaces": False,
    }


def make_sentencepiece_vocabulary(model: bytes, rows: int, *, begins: bool) -> dict[str, HeaderValue]:
    """Converts a SentencePiece model; arguments as in `make_json_vocabulary`.

    Raises:
        ValueError: It is not a model of byte pairs with the identity as normalisation.
    """
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    parts = dict(_read_message(model))  # the last of each: the settings, and one of the pieces
    trainer, normalizer = (dict(_read_message(parts.get(field, b""))) for field in (2, 3))
    # Numbers of fields, and defaults, of sentencepiece_model.proto.
    if trainer.get(3, 1) != 2 or normalizer.get(2) or not normalizer.get(5, 1):
        raise ValueError("its SentencePiece model is not one of byte pairs without normalisation")
    used = range(processor.get_piece_size())
    unused = range(len(used), rows)
    kinds = (
        (UNKNOWN, processor.is_unknown),
        (CONTROL, processor.is_control),
        (BYTE, processor.is_byte),
        (UNUSED, processor.is_unused),
        (NORMAL, lambda id: True),
    )
    stated = [next(kind for kind, holds in kinds if holds(id)) for id in used]
    return {
        f"{KEY}model": "llama",
        f"{KEY}pre": "default",
        f"{KEY}tokens": [processor.id_to_piece(id) for id in used] + [f"[PAD{id}]" for id in unused],
        f"{KEY}scores": [processor.get_score(id) for id in used] + [-1000.0 for _ in unused],
        f"{KEY}token_type": stated + [UNUSED for _ in unused],
        f"{KEY}add_space_prefix": bool(normalizer.get(3, 1)),
        f"{KEY}remove_extra_whitespaces": bool(normalizer.get(4, 1)),
        f"{KEY}add_bos_token": begins,
    }


def _read_message(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the number and the value of each field of a protocol buffer."""
    place = 0

    def read_integer() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = content[place]
            place, value, shift = place + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while place < len(content):
        field, kind = divmod(read_integer(), 8)
        size = {1: 8, 5: 4}.get(kind, 0)
        if kind == 0:
            yield field, read_integer()
        else:
            size = read_integer() if kind == 2 else size
            place += size
            yield field, content[place - size : place]
