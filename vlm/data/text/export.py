"""Exports tokenizers of vlm as tokenizer.json, the format of the library `tokenizers`, or as SentencePiece models."""

import json
from typing import Any

from vlm.data.text.hugging_face import MARIAN, MODELS
from vlm.data.text.library import JsonTokenizer, PieceModelTokenizer
from vlm.data.text.subwords import BYTE_OF, SubwordTokenizer, WordPieceTokenizer
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer, PieceTableTokenizer, SentencePieceTokenizer
from vlm.data.text.tokenizer_base import SPACE, Tokenizer


def make_tokenizer_files(tokenizer: Tokenizer) -> dict[str, str | bytes]:
    """Name and content of each file of a tokenizer: original SentencePiece models unchanged, others as tokenizer.json.

    Texts get the same ids, except if they contain a special token or U+2581, SentencePiece's mark for a space.
    """
    if isinstance(tokenizer, PieceModelTokenizer):
        if not tokenizer.canonicalises:
            return {MODELS[0]: tokenizer.model()}
        about = {"tokenizer_class": "SiglipTokenizer", **_list_special_pieces(tokenizer)}
        return {MODELS[1]: tokenizer.model(), "tokenizer_config.json": json.dumps(about)}
    if isinstance(tokenizer, PieceTableTokenizer):
        vocab = {"vocab.json": json.dumps({piece: id for id, piece in enumerate(tokenizer.table)})}
        if len(tokenizer.models()) < len(MARIAN):
            return {MODELS[0]: tokenizer.models()[0], **vocab}
        vocab["tokenizer_config.json"] = '{"tokenizer_class": "MarianTokenizer"}\n'
        return {**dict(zip(MARIAN, tokenizer.models(), strict=True)), **vocab}
    from tokenizers import AddedToken

    library = _build_library(tokenizer)
    special = _list_special_pieces(tokenizer)
    # Pretrained subword tokenizers have their own special tokens.
    special_ids = [id for id in range(tokenizer.vocab_size) if not tokenizer.decode([id])]
    pieces = dict.fromkeys([*special.values(), *(tokenizer.piece(id) for id in special_ids)])
    library.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in pieces])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    return {
        "tokenizer.json": library.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False),
    }


def list_pieces(tokenizer: Tokenizer) -> list[str] | None:
    """The bytes of each id, decoded as Latin-1; joining those of a text and decoding them as UTF-8 restores it.

    None for a tokenizer whose `decode` does more than join pieces.
    """
    if type(tokenizer).decode not in (Tokenizer.decode, PieceTableTokenizer.decode):
        return None
    return [tokenizer.bytes_of(id).decode("latin1") for id in range(tokenizer.vocab_size)]


def _list_special_pieces(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {name: getattr(tokenizer, f"{name}_id") for name in ("pad", "bos", "eos", "unk", "mask")}
    return {f"{name}_token": tokenizer.piece(id) for name, id in ids.items() if id is not None}


def _build_library(tokenizer: Tokenizer) -> Any:
    """Builds the library's tokenizer, without special tokens."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    if isinstance(tokenizer, SubwordTokenizer):
        library = Library.from_str(tokenizer._library.to_str())
        if isinstance(tokenizer, WordPieceTokenizer):
            library.decoder = decoders.WordPiece()
        elif not isinstance(tokenizer, JsonTokenizer):  # a JsonTokenizer has its own decoder
            library.decoder = decoders.ByteLevel()
        return library
    vocab = {tokenizer.piece(id): id for id in range(tokenizer.vocab_size)}
    lower: list[Any] = [normalizers.Lowercase()] if tokenizer._options["lowercase"] else []
    if isinstance(tokenizer, ByteTokenizer):
        char_of = {byte: char for char, byte in BYTE_OF.items()}
        vocab = {char_of[id - 3] if 3 <= id < 259 else tokenizer.piece(id): id for id in vocab.values()}
        library = Library(models.BPE(vocab=vocab, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.decoder = decoders.ByteLevel()
        library.normalizer = normalizers.Sequence(lower)
        return library
    if isinstance(tokenizer, SentencePieceTokenizer):
        library = Library(_convert_sentencepiece(tokenizer))
        lower.append(normalizers.Replace(" ", SPACE))
        library.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        assert isinstance(tokenizer, CharTokenizer)
        texts = {id: tokenizer.decode([id]) for id in vocab.values() if id >= 259}
        vocab = {texts.get(id) or piece: id for piece, id in vocab.items()}
        library = Library(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
        library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    library.normalizer = normalizers.Sequence(lower)
    return library


def _convert_sentencepiece(tokenizer: SentencePieceTokenizer) -> Any:
    """Converts SentencePiece's model to one of the library's models."""
    from tokenizers import models

    pieces = [tokenizer._model.id_to_piece(id) for id in range(tokenizer._model.get_piece_size())]
    scores = [tokenizer._model.get_score(id) for id in range(len(pieces))]
    bytewise = tokenizer._options["byte_fallback"]
    if tokenizer._options["model_type"] == "unigram":
        vocab = list(zip(pieces, scores, strict=True))
        return models.Unigram(vocab, unk_id=tokenizer.unk_id, byte_fallback=bytewise)
    ids = {piece: id for id, piece in enumerate(pieces)}
    model = tokenizer._model
    special = {id for id in ids.values() if model.is_control(id) or model.is_unknown(id) or model.is_byte(id)}
    usual = [id for id in range(len(pieces)) if id not in special]
    merges = []
    for id in sorted(usual, key=lambda id: -scores[id]):
        halves = ((pieces[id][:at], pieces[id][at:]) for at in range(1, len(pieces[id])))
        pairs = [pair for pair in halves if pair[0] in ids and pair[1] in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=bytewise)
