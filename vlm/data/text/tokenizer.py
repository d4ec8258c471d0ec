"""Lossless tokenizers, learned from training texts with SentencePiece, also with a separate table of ids."""

import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from vlm.data.text.library import UNUSED, JsonTokenizer, PieceModelTokenizer, make_sentencepiece_row
from vlm.data.text.subwords import BytePairTokenizer, WordPieceTokenizer
from vlm.data.text.tokenizer_base import (
    MAX_LOCATIONS,
    MAX_PIECES,
    SPACE,
    GivenTokenizer,
    Row,
    Tokenizer,
    check_vocabulary,
    compute_fingerprint,
    format_piece,
)
from vlm.errors import Count, Share, UserError

_LANGUAGE = re.compile(r">>[^<>\s]+<<")  # token for the target language of a translation
XLM_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class PieceTableTokenizer(GivenTokenizer):
    """A tokenizer that splits texts with a SentencePiece model and looks up the ids of their pieces in a table.

    Marian has two models: one for input texts, one for output texts. If its vocabulary has languages, such as
    ">>fra<<", a language at the begin of a text is one token.

    Attributes:
        table: The piece of each id.
    """

    @classmethod
    def of_models(
        cls, models: Sequence[bytes], table: Sequence[str], *, special: Iterable[int], bare: bool = False, **ids: int
    ) -> Self:
        """Creates the tokenizer from one or two SentencePiece models.

        Args:
            table: The piece of each id.
            special: Ids that decode to nothing.
            ids: Ids of pad, bos, eos and unk.
        Raises:
            ValueError: An id is outside the table, or a model cannot be read.
        """
        tokenizer, sizes = cls(bare=bare), [len(model) for model in models]
        head = {"table": list(table), "special": sorted({*special}), "sizes": sizes, **ids}
        tokenizer._load_parts(head, b"".join(models))
        return tokenizer

    def encode(self, text: str) -> list[int]:
        return self._ids(self._models[0], text)

    def encode_written(self, text: str) -> list[int]:
        return self._ids(self._models[-1], text)

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).strip(" ")

    def models(self) -> list[bytes]:
        """The content of the SentencePiece models' files."""
        return [model.serialized_model_proto() for model in self._models]

    def _ids(self, model: Any, text: str) -> list[int]:
        text, ids = self._prepare(text), list[int]()
        if (match := _LANGUAGE.match(text)) and match[0] in self._id_of:
            ids, text = [self._id_of[match[0]]], text[match.end() :]
        return ids + [self._id_of.get(piece, self._unknown) for piece in model.encode(text, out_type=str)]

    def _build(self, learned: bytes) -> Sequence[Row]:
        import sentencepiece

        head, _, rest = learned.partition(b"\n")
        parts = json.loads(head)
        table, sizes = parts["table"], parts["sizes"]
        check_vocabulary(table, [*parts["special"], *(parts[name] for name in ("pad", "bos", "eos", "unk"))])
        if not 1 <= len(sizes) <= 2 or sum(sizes) != len(rest) or min(sizes) < 0:
            raise ValueError("its models do not have the stated sizes")
        self.pad_id, self.bos_id, self.eos_id, self._unknown = (parts[name] for name in ("pad", "bos", "eos", "unk"))
        self.table, self.unk_id, self._id_of = table, self._unknown, {piece: id for id, piece in enumerate(table)}
        ends = [sum(sizes[: count + 1]) for count in range(len(sizes))]
        protos = [rest[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self._models = [sentencepiece.SentencePieceProcessor(model_proto=proto) for proto in protos]
        special = {*parts["special"]}
        return [(b"", piece) if id in special else _make_row(piece) for id, piece in enumerate(table)]


def _make_row(piece: str) -> Row:
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)]), piece
    text = piece.replace(SPACE, " ")
    return text.encode(), format_piece(text)


def pad_table(table: Sequence[str], size: int) -> list[str]:
    """Extends a table with names for the rows of the weights that have no piece."""
    return [*table, *(UNUSED.format(id) for id in range(len(table), min(size, MAX_PIECES)))]


SPECIAL: tuple[Row, ...] = ((b"", "<pad>"), (b"", "<s>"), (b"", "</s>"))
BYTES: tuple[Row, ...] = tuple((bytes([byte]), f"<0x{byte:02X}>") for byte in range(256))
NOT_LEARNED = ("lowercase", "mask", "languages", "locations")  # options that are not passed to the trainer
LINE = 2048  # maximum characters of a training sentence, to bound the trainer's memory


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8; needs no training and supports every language (Xue et al. 2022, ByT5)."""

    def __init__(self, *, lowercase: bool = False, mask: bool = False) -> None:
        super().__init__(lowercase=lowercase, mask=mask)
        self._load(b"")

    def fit(self, texts: Iterable[str], cache: Path | None = None) -> Self:
        """Does nothing, because there is nothing to learn."""
        return self

    def encode(self, text: str) -> list[int]:
        """One id per byte of UTF-8."""
        return [byte + len(SPECIAL) for byte in self._prepare(text).encode()]

    def _learn(self, captions: Sequence[str]) -> bytes:
        return b""

    def _build(self, learned: bytes) -> Sequence[Row]:
        if learned:
            raise ValueError("a byte tokenizer learns nothing")
        return SPECIAL + tuple((raw, format_piece(raw.decode()) if raw < b"\x80" else name) for raw, name in BYTES)


class CharTokenizer(Tokenizer):
    """One id per character of the training texts, sorted by code point; other characters become bytes."""

    def encode(self, text: str) -> list[int]:
        """One id per known character, one to four for others."""
        self._require_fit()
        ids: list[int] = []
        for char in self._prepare(text):
            id = self._ids.get(char)
            ids.extend([id] if id is not None else (byte + len(SPECIAL) for byte in char.encode()))
        return ids

    def _learn(self, captions: Sequence[str]) -> bytes:
        return "".join(sorted(set().union(*captions))).encode()

    def _build(self, learned: bytes) -> Sequence[Row]:
        chars = learned.decode()
        if sorted(set(chars)) != list(chars):
            raise ValueError("its characters are not sorted or not unique")
        self._ids = {char: id for id, char in enumerate(chars, len(SPECIAL) + len(BYTES))}
        return SPECIAL + BYTES + tuple((char.encode(), format_piece(char)) for char in chars)


class SentencePieceTokenizer(Tokenizer):
    """Subwords of SentencePiece (Kudo and Richardson 2018): unigram (Kudo 2018) or BPE (Sennrich et al. 2016).

    Texts are not normalised: spaces, line breaks and case are kept. Line breaks, tabs and NUL never join longer pieces.

    Args:
        vocab_size: Maximum number of ids; a small corpus gives fewer. The attribute is the actual number.
        model_type: "unigram" or "bpe".
        byte_fallback: Whether unknown characters become bytes; else `unk_id`, which decodes to U+FFFD.
        character_coverage: Share of the texts' characters that are covered by pieces, 0.98 to 1.
        lowercase: Whether to convert texts to lower case first.
        mask: See Tokenizer.
    Raises:
        UserError: An option is unknown or out of range.
    """

    unk_id: int | None = 3

    def __init__(
        self,
        *,
        vocab_size: Count = 8000,
        model_type: str = "bpe",
        byte_fallback: bool = True,
        character_coverage: Share = 0.9995,
        lowercase: bool = False,
        mask: bool = False,
    ) -> None:
        super().__init__(lowercase=lowercase, mask=mask)
        reserved = len(SPECIAL) + 1 + (len(BYTES) if byte_fallback else 1) + 1  # unknown, line break, space
        if vocab_size <= reserved:
            raise UserError(f"tokenizer.vocab_size: {vocab_size} does not exceed the {reserved} reserved ids; raise it")
        if model_type not in ("unigram", "bpe"):
            raise UserError(f"tokenizer.model_type: {model_type!r} is unknown; give unigram or bpe")
        if not 0.98 <= character_coverage <= 1:
            raise UserError(f"tokenizer.character_coverage: {character_coverage} is not between 0.98 and 1")
        self._options |= dict(vocab_size=vocab_size, model_type=model_type)
        self._options |= dict(byte_fallback=byte_fallback, character_coverage=character_coverage)

    def encode(self, text: str) -> list[int]:
        """Ids of the most probable (unigram) or most merged (BPE) pieces."""
        self._require_fit()
        first, *rest = self._prepare(text).split(SPACE)
        ids: list[int] = self._model.encode(first)
        for part in rest:
            ids += self._mark + self._model.encode(part)
        return ids

    def _recipe(self) -> dict[str, Any]:
        import sentencepiece

        return {**self._options, **self._trainer_options(), "sentencepiece": sentencepiece.__version__}

    def _trainer_options(self) -> dict[str, Any]:
        options = {name: value for name, value in self._options.items() if name not in NOT_LEARNED}
        options |= dict(pad_id=self.pad_id, bos_id=self.bos_id, eos_id=self.eos_id, unk_id=self.unk_id)
        return options | {
            "normalization_rule_name": "identity",
            "add_dummy_prefix": False,
            "remove_extra_whitespaces": False,
            # Line breaks are not part of training sentences, so without byte fallback they need their own symbol.
            "user_defined_symbols": [] if options["byte_fallback"] else ["\n"],
            "required_chars": SPACE,  # otherwise a rare space becomes bytes, like U+2581
            "hard_vocab_limit": False,  # otherwise a corpus that is too small for vocab_size is an error
            "max_sentence_length": 4 * LINE,  # in bytes; longer lines would be dropped
            "num_threads": 1,  # results of the unigram model depend on the number of threads
            "minloglevel": 2,
        }

    def _learn(self, captions: Sequence[str]) -> bytes:
        import sentencepiece

        # The trainer drops sentences with U+2585, its mark of unknowns, and reserves NUL and tab.
        lines = re.compile(f"[^\n\r\t\0\u2585{SPACE}]{{1,{LINE}}}")
        sentences = [line for caption in captions for line in lines.findall(caption)]
        if not sentences:
            raise UserError("the training texts are empty, so no tokenizer can be learned; check data.root")
        model = io.BytesIO()
        options = self._trainer_options() | {"sentence_iterator": iter(sentences), "model_writer": model}
        try:
            sentencepiece.SentencePieceTrainer.train(**options)
        except RuntimeError as error:
            size, reason = options["vocab_size"], str(error).rpartition("] ")[2]
            if least := re.search(r"smaller than required_chars. \d+ vs (\d+)", reason):
                raise UserError(
                    f"tokenizer.vocab_size: {size} is too small for the characters of these texts; set "
                    f"tokenizer.vocab_size={int(least[1]) + 1000}, or tokenizer=bytes"
                ) from None
            raise UserError(
                f"tokenizer.vocab_size: {size} does not suit these texts; SentencePiece says: {reason}"
            ) from None
        return model.getvalue()

    def _build(self, learned: bytes) -> Sequence[Row]:
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor()
        model.LoadFromSerializedProto(learned)
        self._model = model
        spelled = [model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        self._mark: list[int] = spelled if model.is_byte(spelled[0]) else [model.unk_id()]
        return [make_sentencepiece_row(model, id) for id in range(model.get_piece_size())]


class BuiltTokenizerState(dict[str, Any]):
    """The state of a tokenizer that is built already, which the first `tokenizer_from_state` returns.

    To build it again takes as long as to read a small model. `dict` makes a state without it, to be stored.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer.state())
        self._tokenizer: Tokenizer | None = tokenizer

    def take(self) -> Tokenizer | None:
        """Returns the tokenizer, only once, because its user may change it; then None."""
        tokenizer, self._tokenizer = self._tokenizer, None
        return tokenizer


def tokenizer_from_state(state: dict[str, Any]) -> Tokenizer:
    """Restores a tokenizer from `Tokenizer.state`; only our own classes are allowed.

    Raises:
        UserError: The state is damaged, or its class is unknown.
    """
    if isinstance(state, BuiltTokenizerState) and (built := state.take()) is not None:
        return built
    ours = (ByteTokenizer, CharTokenizer, SentencePieceTokenizer)
    kinds = (*ours, BytePairTokenizer, WordPieceTokenizer, JsonTokenizer, PieceModelTokenizer, PieceTableTokenizer)
    classes: dict[str, type[Tokenizer]] = {kind.__name__: kind for kind in kinds}
    try:
        name, options, learned = state["class"], state["options"], state["learned"].encode("latin1")
        if name not in classes:
            raise UserError(f"the checkpoint's tokenizer {name!r} is unknown; known are {', '.join(classes)}")
        # Checked before the bytes reach a library's parser, which may not handle damaged input.
        if compute_fingerprint(name, options, learned) != state["fingerprint"]:
            raise ValueError("its fingerprint differs")
        added = ("languages", "locations")
        tokenizer = classes[name](**{key: value for key, value in options.items() if key not in added})
        tokenizer.add_languages(options.get("languages", ()))
        if (locations := options.get("locations", 0)) != 0:
            if not (type(locations) is int and 0 < locations <= MAX_LOCATIONS):
                raise ValueError(f"its number of locations is not from 1 to {MAX_LOCATIONS:,}")
            tokenizer.add_locations(locations)
        tokenizer._load(learned)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the checkpoint's tokenizer is damaged ({error!r}); use another copy of it") from None
    return tokenizer
