"""Tokenizers of other projects: tokenizer.json, read by the library `tokenizers`, and original SentencePiece models."""

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from vlm.data.text.subwords import BYTE_OF, SubwordTokenizer, serialize_parts
from vlm.data.text.tokenizer_base import MAX_PIECES, SPACE, GivenTokenizer, Row, check_ids, format_piece
from vlm.errors import UserError

# Regular expressions that a file may contain. Others are refused, because they might take unbounded time.
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CLIP = rf"{_WORDS}|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+"
PATTERNS = {
    rf"{_WORDS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",  # GPT-2
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    rf"(?i:{_WORDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",  # Llama 3
    rf"(?i:{_WORDS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",  # Qwen2, Qwen3
    _CLIP,
    rf"<\|startoftext\|>|<\|endoftext\|>|{_CLIP}",
    *(r"\p{N}{1,3}", r"\p{N}", r"\d", r" {2,}", r"\s+", r"\n"),
}
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
UNUSED = "<unused {}>"  # name of a row of the weights that has no piece


class JsonTokenizer(SubwordTokenizer):
    """A tokenizer.json of any kind: byte-level BPE with its own pattern, BPE with byte fallback, Unigram, WordPiece.

    Special tokens in a text are not recognised; other added tokens are.
    """

    OPTIONS: ClassVar = {"library": (dict,)}
    _mask: int | None = None

    @classmethod
    def of_file(cls, content: Mapping[str, Any], *, size: int | None, bare: bool = False, **ids: int) -> Self:
        """Creates the tokenizer from a file's content.

        Args:
            size: Number of rows of the model's embedding, which may exceed the number of pieces.
            bare: See Tokenizer.
            ids: Ids of pad, bos and eos.
        Raises:
            ValueError: The library cannot read it, or it contains an unknown pattern.
        """
        library = {name: part for name, part in content.items() if name not in ("truncation", "padding")}
        added = [token["id"] for token in library.get("added_tokens") or () if token["special"]]
        parts = {"library": library, "special": sorted({*added, *ids.values()}), "size": size or 0, **ids}
        tokenizer = cls(bare=bare)
        tokenizer._rows = tokenizer._assemble(parts)
        tokenizer._learned = serialize_parts(parts | {"probe": tokenizer._probe()})
        return tokenizer

    @property
    def mask_id(self) -> int | None:
        return self._mask

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes with the file's decoder; special and unused ids are skipped."""
        return self._library.decode([id for id in ids if self._row(id)[0]], skip_special_tokens=False)

    def encode_marked(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens are recognised, without begin and end."""
        return self._marking_library.encode(text, add_special_tokens=False).ids

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Like `encode_marked`, with the span of characters of each token."""
        encoded = self._marking_library.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def marks(self, text: str) -> list[str]:
        """The special tokens whose names occur in a text."""
        return [name for name in self._special_names if name in text]

    @cached_property
    def _marking_library(self) -> Any:
        from tokenizers import Tokenizer as Library

        return Library.from_str(self._file_library.to_str())  # a copy, because other threads use the original unchanged

    @cached_property
    def _special_names(self) -> list[str]:
        return [token.content for token in self._file_library.get_added_tokens_decoder().values() if token.special]

    def _assemble(self, parts: Mapping[str, Any]) -> Sequence[Row]:
        size = parts["size"]
        if type(size) is not int or not 0 <= size <= MAX_PIECES:
            raise ValueError("its size is out of bounds")
        self._file_library = self._load_library(parts["library"])
        pieces = self._file_library.get_vocab(with_added_tokens=True)
        if max(pieces.values(), default=0) >= MAX_PIECES:
            raise ValueError(f"it has ids from {MAX_PIECES:,} on")
        vocab = [UNUSED.format(id) for id in range(max(size, 1 + max(pieces.values(), default=0)))]
        for piece, id in pieces.items():
            vocab[id] = piece
        unused = [id for id, piece in enumerate(vocab) if piece not in pieces]
        rest = {name: value for name, value in parts.items() if name != "size"}
        return super()._assemble(rest | {"vocab": vocab, "special": sorted({*parts["special"], *unused})})

    def _create_library(self, parts: Mapping[str, Any]) -> Any:
        library = self._file_library
        bare, full = (library.encode("a", add_special_tokens=special).ids for special in (False, True))
        places = range(len(full) - len(bare) + 1)  # the file's template adds ids before a text
        self.starts = full[: next((at for at in places if full[at : at + len(bare)] == bare), 0)]
        named = (library.token_to_id(name) for name in ("[MASK]", "<mask>"))
        self._mask = next((id for id in named if id is not None), None)
        model = parts["library"]["model"]
        unknown = model.get("unk_token") if model.get("type") != "Unigram" else None
        self.unk_id = model.get("unk_id") if unknown is None else library.token_to_id(unknown)
        decoder = parts["library"].get("decoder")
        decoders = decoder.get("decoders", [decoder]) if isinstance(decoder, Mapping) else []
        self._bytewise = any(isinstance(part, Mapping) and part.get("type") == "ByteLevel" for part in decoders)
        return library

    @staticmethod
    def _load_library(content: Mapping[str, Any]) -> Any:
        """Loads the library's tokenizer of a file, after a check of its patterns."""
        from tokenizers import Tokenizer as Library

        for component, part in content.items():
            if unknown := next((text for text in _find_patterns({component: part}) if text not in PATTERNS), None):
                raise ValueError(f"its {component} has the unsupported pattern {unknown!r:.100}")
        try:
            library = Library.from_str(json.dumps(content))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as fault:  # a panic in Rust is not an Exception
            raise ValueError(str(fault).split("\n")[0]) from fault
        library.encode_special_tokens = True
        return library

    def _make_row(self, piece: str) -> Row:
        if self._bytewise and all(char in BYTE_OF for char in piece):
            raw = bytes(BYTE_OF[char] for char in piece)
        elif len(piece) == 6 and piece.startswith("<0x"):
            raw = bytes([int(piece[3:5], 16)])
        else:
            raw = piece.replace(SPACE, " ").encode()
        text = raw.decode("utf-8", "replace")
        return raw, "".join(f"<0x{byte:02X}>" for byte in raw) if "\ufffd" in text else format_piece(text)


class PieceModelTokenizer(GivenTokenizer):
    """An original SentencePiece model (Kudo and Richardson 2018) of pretrained weights, with its own normalisation."""

    @classmethod
    def of_file(cls, model: bytes, *, size: int, starts: Sequence[int], bare: bool = False, **ids: int) -> Self:
        """Creates the tokenizer from a model's bytes; arguments as in `JsonTokenizer.of_file`.

        Args:
            starts: Ids that a prompt begins with.
        """
        tokenizer = cls(bare=bare)
        tokenizer._load_parts({"size": size, "starts": list(starts), **ids}, model)
        return tokenizer

    @classmethod
    def canonical(cls, model: bytes, *, size: int, **pieces: str) -> Self:
        """Creates a tokenizer that converts texts to lower case and removes punctuation (SigLIP).

        Args:
            pieces: The pieces of pad, bos and eos.
        """
        import sentencepiece

        stated = sentencepiece.SentencePieceProcessor(model_proto=model)
        tokenizer = cls()
        ids = {name: stated.piece_to_id(piece) for name, piece in pieces.items()}
        tokenizer._load_parts({"size": size, "starts": [], "canonical": True, **ids}, model)
        return tokenizer

    @classmethod
    def of_path(cls, path: Path) -> Self:
        """Creates the tokenizer from a model file, with the model's own special ids.

        Raises:
            UserError: The file cannot be read, or the model has no end token.
        """
        import sentencepiece

        from vlm.models.pretrained.folder import MAX_TEXT  # imported here because it imports torch

        try:
            if path.stat().st_size > MAX_TEXT:
                raise ValueError(f"it has more than {MAX_TEXT:,} bytes")
            model = path.read_bytes()
            stated = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (OSError, RuntimeError, ValueError) as fault:
            reason = "it is not a SentencePiece model" if isinstance(fault, RuntimeError) else fault
            raise UserError(f"{path} cannot be read ({reason}); give a SentencePiece model") from fault
        ids = {"pad": stated.pad_id(), "bos": stated.bos_id(), "eos": stated.eos_id()}  # -1 if missing
        if ids["eos"] < 0:
            raise UserError(f"{path}: has no end token; give a model with one")
        existing = {name: ids["eos"] if id < 0 else id for name, id in ids.items()}
        return cls.of_file(model, size=0, starts=[ids["bos"]] if ids["bos"] >= 0 else [], bare=False, **existing)

    def encode(self, text: str) -> list[int]:
        self._require_fit()
        if not self.canonicalises:
            return self._model.encode(self._prepare(text))
        # The model's normalisation drops a leading space, so the unknown piece is added before it and removed later.
        unknown = self._model.id_to_piece(self._model.unk_id())
        text = " ".join((SPACE + text.replace(SPACE, " ")).lower().translate(_NO_PUNCTUATION).split())
        return self._model.encode(unknown + text)[len(self._model.encode(unknown)) :]

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([id for id in ids if self._row(id)[0]])

    def model(self) -> bytes:
        """The content of the SentencePiece model's file."""
        return self._model.serialized_model_proto()

    def _build(self, learned: bytes) -> Sequence[Row]:
        import sentencepiece

        head, _, model = learned.partition(b"\n")
        parts = json.loads(head)
        self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        rows = [make_sentencepiece_row(self._model, id) for id in range(self._model.get_piece_size())]
        rows += [(b"", UNUSED.format(id)) for id in range(len(rows), min(parts["size"], MAX_PIECES))]
        check_ids([*parts["starts"], *(parts[name] for name in ("pad", "bos", "eos"))], len(rows))
        self.pad_id, self.bos_id, self.eos_id = (parts[name] for name in ("pad", "bos", "eos"))
        self.starts, self.unk_id = parts["starts"], self._model.unk_id()
        self.canonicalises = parts.get("canonical") is True
        return rows


def make_sentencepiece_row(model: Any, id: int) -> Row:
    """Returns the row of an id of a SentencePiece model."""
    piece: str = model.id_to_piece(id)
    if model.is_control(id):
        return b"", piece
    if model.is_unknown(id):
        return "\ufffd".encode(), piece
    if model.is_byte(id):
        return bytes([int(piece[1:-1], 16)]), piece
    text = piece.replace(SPACE, " ")
    return text.encode(), format_piece(text)


def _find_patterns(part: Any) -> Iterator[str]:
    """Yields the regular expressions of a tokenizer.json, except those in its vocabulary."""
    if isinstance(part, Mapping):
        for name, value in part.items():
            if name == "Regex" and isinstance(value, str):
                yield value
            elif name not in ("vocab", "merges", "added_tokens"):
                yield from _find_patterns(value)
    elif isinstance(part, list):
        for value in part:
            yield from _find_patterns(value)
