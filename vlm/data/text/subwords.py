"""Subword tokenizers of GPT-2 and BERT with pretrained vocabularies, using the library `tokenizers`.

A checkpoint stores the vocabulary, the merges and a fixed set of options, from which the tokenizer is built; files of
the library itself are never loaded.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from typing import Any, ClassVar, Self

from vlm.data.text.tokenizer_base import MAX_PIECE, MAX_PIECES, GivenTokenizer, Row, check_vocabulary, format_piece

# Texts encoded on creation and on loading, to detect versions of the library that give other ids.
PROBES = (
    "A man's 2 dogs don't run; they'll WAIT...",
    "  two  spaces\ttab\r\nlines\n\n",
    "Zürich naïve Ελλάδα Привет 東京 العربية हिन्दी \U0001f642\u200d e\u0301",
    "x" * 120 + " <|endoftext|> [SEP] ##s \u2581 \x00\x7f\xa0",
)


class _Rows(Sequence[Row]):
    """Rows of all ids, each created on demand, because few of 50,000 are needed."""

    def __init__(self, vocab: Sequence[str], special: set[int], row_of: Callable[[str], Row]) -> None:
        self._vocab, self._special, self._make_row = vocab, special, row_of

    def __len__(self) -> int:
        return len(self._vocab)

    def __getitem__(self, id: Any) -> Any:
        piece = self._vocab[id]
        return (b"", piece) if id in self._special else self._make_row(piece)


class SubwordTokenizer(GivenTokenizer):
    """Base of tokenizers with a pretrained vocabulary.

    `learned` is JSON with the vocabulary in the order of ids, the ids that decode to nothing, and the options.

    Attributes:
        OPTIONS: Options and the types of their values.
    """

    OPTIONS: ClassVar[Mapping[str, tuple[type, ...]]]

    @classmethod
    def of(cls, vocab: Sequence[str], *, special: Iterable[int], **options: Any) -> Self:
        """Creates the tokenizer of a vocabulary.

        Args:
            vocab: The piece of each id.
            special: Ids that decode to nothing.
            options: Values of OPTIONS.
        Raises:
            ValueError: The arguments are inconsistent.
        """
        parts = {"vocab": list(vocab), "special": sorted(set(special)), **options}
        tokenizer = cls()
        tokenizer._rows = tokenizer._assemble(parts)
        tokenizer._learned = serialize_parts(parts | {"probe": tokenizer._probe()})
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens in the text are not recognised."""
        self._require_fit()
        return self._library.encode(self._prepare(text), add_special_tokens=False).ids

    def _build(self, learned: bytes) -> Sequence[Row]:
        parts = json.loads(learned)
        probe = parts.pop("probe", None)
        rows = self._assemble(parts)
        if probe is not None and probe != self._probe():
            raise ValueError(
                "this version of tokenizers gives other ids; install the version with which it was created"
            )
        return rows

    def _assemble(self, parts: Mapping[str, Any]) -> Sequence[Row]:
        """Creates the library's tokenizer; returns the row of every id."""
        vocab, special = self._validate(parts)
        self.pad_id, self.bos_id, self.eos_id = parts["pad"], parts["bos"], parts["eos"]
        try:
            self._library = self._create_library(parts)
        except ValueError:
            raise
        except Exception as fault:  # the library raises plain exceptions
            raise ValueError(str(fault)) from fault
        return _Rows(vocab, special, self._make_row)

    def _validate(self, parts: Mapping[str, Any]) -> tuple[list[str], set[int]]:
        """Validates the parts; returns the vocabulary and the ids that decode to nothing."""
        kinds = {"vocab": (list,), "special": (list,), "pad": (int,), "bos": (int,), "eos": (int,), **self.OPTIONS}
        if not isinstance(parts, dict) or parts.keys() != kinds.keys():
            raise ValueError("its options do not match its class")
        if wrong := [name for name, kind in kinds.items() if type(parts[name]) not in kind]:
            raise ValueError(f"{wrong[0]} has the wrong type")
        vocab, special = parts["vocab"], parts["special"]
        check_vocabulary(vocab, [*special, *(parts[name] for name in ("pad", "bos", "eos"))])
        if len(set(vocab)) < len(vocab):
            raise ValueError("a piece of the vocabulary is repeated")
        return vocab, set(special)

    def _probe(self) -> str:
        ids = [self._library.encode(text, add_special_tokens=False).ids for text in PROBES]
        return sha256(json.dumps(ids).encode()).hexdigest()

    @abstractmethod
    def _create_library(self, parts: Mapping[str, Any]) -> Any:
        """Creates the library's tokenizer from validated parts."""

    @abstractmethod
    def _make_row(self, piece: str) -> Row:
        """Returns the row of an id that is not special."""


class BytePairTokenizer(SubwordTokenizer):
    """Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019, section 2.2); lossless for any text."""

    OPTIONS: ClassVar = {"merges": (list,), "prefix_space": (bool,)}

    def _create_library(self, parts: Mapping[str, Any]) -> Any:
        from tokenizers import Tokenizer, models, pre_tokenizers

        merges = [tuple(pair) for pair in parts["merges"]]
        kinds = {*map(len, merges), *map(type, chain.from_iterable(merges))}
        if len(merges) > MAX_PIECES or not kinds <= {2, str}:
            raise ValueError("a merge must be a pair of pieces")
        special = {*parts["special"]}
        _decode_characters("".join(piece for id, piece in enumerate(parts["vocab"]) if id not in special))
        vocab = {piece: id for id, piece in enumerate(parts["vocab"])}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=parts["prefix_space"], use_regex=True)
        return tokenizer

    def _make_row(self, piece: str) -> Row:
        raw = _decode_characters(piece)
        text = raw.decode("utf-8", "replace")
        return raw, "".join(f"<0x{byte:02X}>" for byte in raw) if "\ufffd" in text else format_piece(text)


class WordPieceTokenizer(SubwordTokenizer):
    """BERT's WordPiece (Devlin et al. 2019; Wu et al. 2016); spaces and usually case are lost."""

    OPTIONS: ClassVar = {
        "unk": (int,),
        "clean_text": (bool,),
        "chinese_chars": (bool,),
        "strip_accents": (bool, type(None)),
        "lower": (bool,),
        "longest_word": (int,),
        "mask": (int, type(None)),
    }
    _mask: int | None = None
    _vocab: Sequence[str] = ()

    @property
    def mask_id(self) -> int | None:
        return self._mask

    def decode(self, ids: Sequence[int]) -> str:
        """Joins words by spaces and attaches punctuation; a continuation at the beginning keeps ##."""
        text = super().decode(ids)
        first = next((self._vocab[id] for id in ids if self._row(id)[0]), "")
        return f"{CONTINUES}{text}" if first.startswith(CONTINUES) else text.removeprefix(" ")

    def _create_library(self, parts: Mapping[str, Any]) -> Any:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

        vocab, self.unk_id = {piece: id for id, piece in enumerate(parts["vocab"])}, parts["unk"]
        self._mask, self._vocab = parts["mask"], parts["vocab"]
        in_range = all(0 <= id < len(vocab) for id in (parts["unk"], parts["mask"] or 0))
        if not in_range or not 1 <= parts["longest_word"] <= MAX_PIECE:
            raise ValueError("an option is out of range")
        options = {"max_input_chars_per_word": parts["longest_word"], "unk_token": parts["vocab"][parts["unk"]]}
        tokenizer = Tokenizer(models.WordPiece(vocab=vocab, continuing_subword_prefix=CONTINUES, **options))
        tokenizer.normalizer = normalizers.BertNormalizer(
            clean_text=parts["clean_text"],
            handle_chinese_chars=parts["chinese_chars"],
            strip_accents=parts["strip_accents"],
            lowercase=parts["lower"],
        )
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer

    def _make_row(self, piece: str) -> Row:
        joined = piece.startswith(CONTINUES) or _JOINED.match(piece)
        text = piece.removeprefix(CONTINUES) if joined else f" {piece}"
        return text.encode(), format_piece(text)


def _decode_characters(piece: str) -> bytes:
    try:
        return piece.translate(LATIN1).encode("latin1")
    except UnicodeEncodeError as fault:
        raise ValueError(f"{piece[fault.start]!r} is not one of GPT-2's characters for bytes") from None


def serialize_parts(parts: Mapping[str, Any]) -> bytes:
    """Serializes a tokenizer's learned state, as stored in a checkpoint."""
    return json.dumps(parts, ensure_ascii=True, separators=(",", ":"), sort_keys=True).encode()


_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_UNPRINTABLE = (byte for byte in range(256) if byte not in _PRINTABLE)
# GPT-2's character for each byte: itself if printable, else one from 256 on.
BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_UNPRINTABLE)}
CONTINUES = "##"  # prefix of a piece that continues a word
_JOINED = re.compile(r"[.?!,]|n't|'m|'s|'ve|'re")  # pieces that are written without a leading space
# Maps each of these characters to the Latin-1 character of its byte, and others to one outside of Latin-1.
LATIN1 = dict.fromkeys(range(256), 0xFFFD) | {ord(char): byte for char, byte in BYTE_OF.items()}
