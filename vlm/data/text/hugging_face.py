"""Tokenizers of Hugging Face folders: read, compared with a run's tokenizer, and written."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from vlm.data.text.library import UNUSED, JsonTokenizer, PieceModelTokenizer
from vlm.data.text.subwords import BYTE_OF, BytePairTokenizer, SubwordTokenizer, WordPieceTokenizer
from vlm.data.text.tokenizer import (
    XLM_SPECIAL,
    ByteTokenizer,
    CharTokenizer,
    PieceTableTokenizer,
    SentencePieceTokenizer,
    pad_table,
    tokenizer_from_state,
)
from vlm.data.text.tokenizer_base import SPACE, Tokenizer
from vlm.data.text.words import split_lines
from vlm.errors import UserError
from vlm.models.pretrained.architecture import BERT_SPECIAL_TOKENS
from vlm.models.pretrained.folder import Folder

# File names.
MODELS = ("tokenizer.model", "spiece.model")  # SentencePiece models
PLAIN_FILES = ("vocab.json", "vocab.txt")
MARIAN, XLM = ("source.spm", "target.spm"), "sentencepiece.bpe.model"
# Values of tokenizer.json for which BPE is GPT-2's; with any other value, the library reads the file (JsonTokenizer).
BPE: dict[str, tuple] = {
    "dropout": (None,),
    "unk_token": (None, "<|endoftext|>"),  # not needed by byte-level BPE
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
    "fuse_unk": (False,),
    "byte_fallback": (False,),
    "ignore_merges": (False,),
}


BPE_SPECIAL = ("<|endoftext|>", *XLM_SPECIAL, "<mask>")  # special tokens of GPT-2, then of RoBERTa


@dataclass
class _Vocabulary:
    """Vocabulary and options of a folder's tokenizer.

    Args:
        vocab: Piece -> id.
        special: Ids of special tokens.
        options: Options of the tokenizer.
    """

    kind: type[SubwordTokenizer]
    vocab: dict[str, int]
    options: dict[str, Any]
    special: set[int] = field(default_factory=set)


def read_tokenizer(folder: Folder, ids: Mapping[str, int | None] | None = None) -> Tokenizer:
    """Reads a folder's tokenizer: an exported one of ours, tokenizer.json, vocab.json with merges.txt, or vocab.txt.

    Args:
        ids: Ids of pad, bos and eos; default the model's. None means BERT's [PAD], [CLS] or [SEP].
    Raises:
        UserError: It is missing, damaged or not supported.
    """
    if state := folder.vlm_metadata("tokenizer"):
        return tokenizer_from_state(state)
    added = () if ids is not None else folder.architecture.added_tokens
    marked = ids is None and folder.architecture.image is not None  # its prompts contain special tokens
    rows = None  # of the embedding
    if ids is None:
        *_, part = folder.parts.values()
        rows = part.stack.read_arguments(part.config).get("vocab_size")
    ends = BERT_SPECIAL_TOKENS if ids is not None else folder.architecture.special_tokens
    canonical, bare = ids is None and folder.architecture.canonical, ids is None and folder.architecture.omits_bos
    ids = folder.special_ids if ids is None else ids
    try:
        if "auto_map" in (settings := _read_json(folder, "tokenizer_config.json") or {}):
            raise ValueError("it needs custom code (auto_map), which vlm never runs")
        content, model = _read_json(folder, "tokenizer.json"), next(filter(None, map(folder.read_bytes, MODELS)), None)
        if content is None and (marked or (ends is not BERT_SPECIAL_TOKENS and not canonical)):
            raise ValueError("there is no tokenizer.json")
        if content is not None and (marked or ends is not BERT_SPECIAL_TOKENS or not _is_plain(content)):
            vocab = content["model"]["vocab"]  # a list for Unigram
            stated = vocab if isinstance(vocab, Mapping) else {piece: id for id, (piece, _) in enumerate(vocab)}
            added_ids = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
            special = _select_special_ids({**stated, **added_ids}, ids, ends)
            return JsonTokenizer.of_file(content, size=rows, bare=bare, **special)
        if content is None and (table := _read_piece_table(folder, ids, rows, bare=bare)) is not None:
            return table
        if canonical and model is None:
            raise ValueError(f"there is no {MODELS[1]}, which SigLIP's first version has")
        if model is not None and (canonical or (content is None and not any(map(folder.has_file, PLAIN_FILES)))):
            if canonical:
                return PieceModelTokenizer.canonical(model, size=rows or 0, **ends)
            given = {name: id for name, id in ids.items() if id is not None}
            starts = [given["bos"]] if settings.get("add_bos_token", not bare) and "bos" in given else []
            return PieceModelTokenizer.of_file(model, size=rows or 0, starts=starts, bare=bare, **given)
        pieces = _read_vocabulary(folder, content, settings)
        for piece in added:
            pieces.special.add(pieces.vocab.setdefault(piece, len(pieces.vocab)))
        listed = _order_pieces(pieces.vocab, rows or 0)
        options = pieces.options | _select_special_ids(pieces.vocab, ids, ends)
        unused = {id for id, piece in enumerate(listed) if piece not in pieces.vocab}
        return pieces.kind.of(listed, special=pieces.special | unused | {options[name] for name in ids}, **options)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as fault:
        reason = f"no {fault}" if isinstance(fault, KeyError) else fault
        raise UserError(f"the tokenizer in {folder} cannot be used: {reason}; choose another folder") from fault


def _read_piece_table(
    folder: Folder, ids: Mapping[str, int | None], rows: int | None, *, bare: bool
) -> PieceTableTokenizer | None:
    """Reads the tokenizer of Marian's files or of XLM-R's model; None if the folder has neither."""
    given = {name: id for name, id in ids.items() if id is not None}
    if (model := folder.read_bytes(XLM)) is not None:
        import sentencepiece

        stated = sentencepiece.SentencePieceProcessor(model_proto=model)
        names = [name for name in map(stated.id_to_piece, range(stated.get_piece_size())) if name not in XLM_SPECIAL]
        table = pad_table([*XLM_SPECIAL, *names, "<mask>"], rows or 0)
        special = {table.index(piece) for piece in (*XLM_SPECIAL, "<mask>")}
        return PieceTableTokenizer.of_models([model], table, special=special, bare=bare, unk=3, **given)
    if not folder.has_file(MARIAN[0]):
        return None
    if folder.has_file("target_vocab.json"):
        raise ValueError("it has a vocabulary per language, where our models share one")
    vocab, models = _read_json(folder, "vocab.json"), [folder.read_bytes(name) for name in MARIAN]
    if vocab is None or models[1] is None:
        raise ValueError(f"there is no {'vocab.json' if vocab is None else MARIAN[1]}")
    given["unk"] = vocab["<unk>"]
    table = pad_table(_order_pieces(vocab), rows or 0)
    return PieceTableTokenizer.of_models(list(filter(None, models)), table, special=given.values(), bare=bare, **given)


def _order_pieces(vocab: Mapping[str, Any], rows: int = 0) -> list[str]:
    """Returns the piece of each id.

    Args:
        rows: Number of rows of the weights; those without a piece get a name.
    """
    names = [UNUSED.format(id) for id in range(max(rows, len(vocab)))]
    pieces = [*names]
    for piece, id in vocab.items():
        if type(id) is not int or not 0 <= id < len(pieces) or pieces[id] != names[id]:
            raise ValueError(f"the id of {piece!r:.40} is not unique and below {len(pieces)}")
        pieces[id] = piece
    return pieces


def _select_special_ids(
    vocab: Mapping[str, int], ids: Mapping[str, int | None], named: Mapping[str, str]
) -> dict[str, int]:
    bare = {name: vocab.get(named[name]) if id is None else id for name, id in ids.items()}
    if lacking := [name for name, id in bare.items() if id is None]:
        raise ValueError(f"neither the tokenizer nor the config has an id for {', '.join(lacking)}")
    return {name: id for name, id in bare.items() if id is not None}


def _read_json(folder: Folder, name: str) -> dict[str, Any] | None:
    file = folder.read_json(name)
    return None if file is None else dict(file.values)


def _read_vocabulary(folder: Folder, content: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> _Vocabulary:
    if content is not None:
        pieces = _parse_tokenizer_json(content)
        vocab = _read_json(folder, "vocab.json")  # of the folder's other files, which must have the same ids
        if vocab is None and (lines := folder.read_text("vocab.txt")) is not None:
            vocab = _number_lines(lines)
        if wrong := next((piece for piece, id in (vocab or {}).items() if pieces.vocab.get(piece) != id), None):
            raise ValueError(f"its files disagree on the id of {wrong!r:.40}")
    elif (vocab := _read_json(folder, "vocab.json")) is not None:
        pieces = _parse_merges(vocab, folder.read_text("merges.txt"), settings)
    elif (lines := folder.read_text("vocab.txt")) is not None:
        pieces = _parse_lines(lines, settings)
    else:
        raise ValueError("there is no tokenizer.json, tokenizer.model, vocab.json or vocab.txt")
    for piece, id in (_read_json(folder, "added_tokens.json") or {}).items() if content is None else ():
        pieces.vocab.setdefault(piece, id)
        pieces.special.add(id)
    return pieces


def _is_plain(content: Mapping[str, Any]) -> bool:
    """Returns True if a tokenizer.json is plain GPT-2 byte-level BPE or plain BERT WordPiece."""
    model, pre, normal = (content.get(name) or {} for name in ("model", "pre_tokenizer", "normalizer"))
    if not all(token.get("special") for token in content.get("added_tokens") or ()):
        return False
    if model.get("type") == "BPE":
        usual = all(value in BPE[name] for name, value in model.items() if name in BPE)
        ends = content.get("post_processor") or {}
        usual = usual and not (ends.get("type") == "TemplateProcessing" and ends.get("special_tokens"))
        return usual and not normal and pre.get("type") == "ByteLevel" and pre.get("use_regex", True) is True
    kinds = (model.get("type"), pre.get("type"), normal.get("type"))
    usual = model.get("continuing_subword_prefix", "##") == "##"
    return usual and kinds == ("WordPiece", "BertPreTokenizer", "BertNormalizer")


def _parse_tokenizer_json(content: Mapping[str, Any]) -> _Vocabulary:
    model, vocab = content["model"], dict(content["model"]["vocab"])
    if model["type"] == "BPE":
        merges = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in model["merges"]]
        options = {"merges": merges, "prefix_space": content["pre_tokenizer"].get("add_prefix_space", True)}
        pieces = _Vocabulary(BytePairTokenizer, vocab, options)
    else:
        normal = content["normalizer"]
        options = {
            "unk": vocab[model.get("unk_token", "[UNK]")],
            "clean_text": normal.get("clean_text", True),
            "chinese_chars": normal.get("handle_chinese_chars", True),
            "strip_accents": normal.get("strip_accents"),
            "lower": normal.get("lowercase", True),
            "longest_word": model.get("max_input_chars_per_word", 100),
            "mask": vocab.get("[MASK]"),
        }
        pieces = _Vocabulary(WordPieceTokenizer, vocab, options)
    for token in content.get("added_tokens") or ():
        pieces.vocab.setdefault(token["content"], token["id"])
        if pieces.vocab[token["content"]] != token["id"]:
            raise ValueError(f"it has two ids for {token['content']!r:.40}")
        pieces.special.add(token["id"])
    return pieces


def _parse_merges(vocab: dict[str, int], merges: str | None, settings: Mapping[str, Any]) -> _Vocabulary:
    if merges is None:
        raise ValueError("merges.txt is missing")
    lines = [line for line in split_lines(merges) if line and not line.startswith("#version")]
    options = {"merges": [line.split(" ") for line in lines], "prefix_space": settings.get("add_prefix_space", False)}
    named = BPE_SPECIAL if BPE_SPECIAL[-1] in vocab else BPE_SPECIAL[:1]
    special = {vocab[piece] for piece in named if piece in vocab}
    return _Vocabulary(BytePairTokenizer, dict(vocab), options, special)


def _parse_lines(lines: str, settings: Mapping[str, Any]) -> _Vocabulary:
    vocab = _number_lines(lines)
    options = {
        "unk": vocab["[UNK]"],
        "clean_text": True,
        "chinese_chars": settings.get("tokenize_chinese_chars", True),
        "strip_accents": settings.get("strip_accents"),
        "lower": settings.get("do_lower_case", True),
        "longest_word": 100,
        "mask": vocab.get("[MASK]"),
    }
    special = {vocab[name] for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if name in vocab}
    return _Vocabulary(WordPieceTokenizer, vocab, options, special)


def _number_lines(lines: str) -> dict[str, int]:
    return {piece: id for id, piece in enumerate(split_lines(lines))}


FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")  # the first existing one


class TokenDecoder(Protocol):
    """The part of a tokenizer that the comparison needs."""

    unk_id: int | None

    @property
    def vocab_size(self) -> int: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def check_tokens(folder: Folder, tokenizer: TokenDecoder) -> None:
    """Checks that each id of a run's tokenizer has the same text in a folder's tokenizer, if it has one.

    Raises:
        UserError: An id has different texts, or the folder's file cannot be read.
    """
    name = next(filter(folder.has_file, FILES), None)
    if name is None:
        return
    try:
        theirs = _decode_pieces(_read_pieces(folder, name))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise UserError(f"{folder.display_path(name)} cannot be read ({fault!r:.80}); restore the file") from fault
    ours = {id: tokenizer.decode([id]) for id in range(tokenizer.vocab_size)}
    # Special tokens are not compared: they decode to nothing or to a replacement, and their names may differ.
    # SentencePiece drops the space at the beginning of a text.
    same = {id: (text, f" {text}") for id, text in ours.items() if text and id != tokenizer.unk_id}
    wrong = [id for id, texts in same.items() if theirs.get(id) not in texts]
    if wrong:
        id = wrong[0]
        raise UserError(
            f"token {id} is {theirs.get(id)!r:.40} in {folder.display_path(name)}, but {ours[id]!r:.40} in this run; "
            f"{len(wrong):,} of {len(ours):,} tokens differ; choose the tokenizer that the weights were trained with"
        )


def _read_pieces(folder: Folder, name: str) -> dict[int, str]:
    """Reads the piece of each id in a file."""
    if name.endswith(".model"):
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_proto=folder.read_bytes(name))
        return {id: model.id_to_piece(id) for id in range(model.get_piece_size())}
    if name.endswith(".txt"):
        return dict(enumerate(split_lines(folder.read_text(name) or "")))
    content = folder.read_json(name)
    assert content is not None
    vocabulary: Any = content.values
    added: list[Any] = []
    if name == "tokenizer.json":
        added, vocabulary = vocabulary.get("added_tokens", []), vocabulary["model"]["vocab"]
    if isinstance(vocabulary, list):  # a unigram model's, with scores
        vocabulary = {piece: id for id, (piece, _) in enumerate(vocabulary)}
    pieces = {int(id): str(piece) for piece, id in vocabulary.items()}
    return pieces | {int(token["id"]): str(token["content"]) for token in added}


def _decode_pieces(pieces: Mapping[int, str]) -> dict[int, str]:
    """Decodes pieces with GPT-2's characters for bytes, or SentencePiece's mark for spaces."""
    if any("\u0120" in piece for piece in pieces.values()):  # GPT-2's space
        return {
            id: bytes(BYTE_OF[char] for char in piece).decode("utf-8", "replace")
            if all(char in BYTE_OF for char in piece)
            else piece
            for id, piece in pieces.items()
        }
    texts = {}
    for id, piece in pieces.items():
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
        texts[id] = bytes([int(byte[1], 16)]).decode("utf-8", "replace") if byte else piece.replace("\u2581", " ")
    return texts


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
    ids = range(tokenizer.vocab_size)  # a decoder may strip a space, which then has no text either
    special_ids = [id for id in ids if not tokenizer.bytes_of(id) and not tokenizer.decode([id])]
    pieces = dict.fromkeys([*special.values(), *(tokenizer.piece(id) for id in special_ids)], True)
    if locations := tokenizer.location_ids:  # new tokens get the next ids, so that these come in order
        ordered = sorted({*special_ids, *locations})
        pieces = {tokenizer.piece(id): id not in locations for id in ordered}
    for is_special, group in groupby(pieces, pieces.__getitem__):
        tokens = [AddedToken(piece, normalized=False, special=is_special) for piece in group]
        (library.add_special_tokens if is_special else library.add_tokens)(tokens)
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
