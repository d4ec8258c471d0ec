"""SentencePiece models with a separate table of ids: Marian's (vocab.json) and XLM-R's."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Self

from vlm.data.text.library import UNUSED
from vlm.data.text.subwords import MAX_PIECE, MAX_PIECES
from vlm.data.text.tokenizer_base import SPACE, Row, Tokenizer, printable_piece

_LANGUAGE = re.compile(r">>[^<>\s]+<<")  # token for the target language of a translation
XLM_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class PieceTableTokenizer(Tokenizer):
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
        tokenizer = cls(bare=bare)
        sizes = [len(model) for model in models]
        head = {"table": list(table), "special": sorted({*special}), "sizes": sizes, **ids}
        tokenizer._load(json.dumps(head, sort_keys=True).encode() + b"\n" + b"".join(models))
        return tokenizer

    def fit(self, texts: Any, cache: Any = None) -> Self:
        """Does nothing, because the vocabulary is given."""
        self._require_fit()
        return self

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
        if (found := _LANGUAGE.match(text)) and found[0] in self._id_of:
            ids, text = [self._id_of[found[0]]], text[found.end() :]
        return ids + [self._id_of.get(piece, self._unknown) for piece in model.encode(text, out_type=str)]

    def _build(self, learned: bytes) -> Sequence[Row]:
        import sentencepiece

        head, _, rest = learned.partition(b"\n")
        parts = json.loads(head)
        table, sizes = parts["table"], parts["sizes"]
        if not 0 < len(table) <= MAX_PIECES or not all(type(one) is str and len(one) <= MAX_PIECE for one in table):
            raise ValueError(f"the vocabulary exceeds {MAX_PIECES:,} pieces of {MAX_PIECE:,} characters, or is empty")
        if not 1 <= len(sizes) <= 2 or sum(sizes) != len(rest) or min(sizes) < 0:
            raise ValueError("its models are not of the sizes that it states")
        ids = [*parts["special"], *(parts[name] for name in ("pad", "bos", "eos", "unk"))]
        if not all(type(id) is int and 0 <= id < len(table) for id in ids):
            raise ValueError("an id is outside the vocabulary")
        self.pad_id, self.bos_id, self.eos_id, self._unknown = (parts[name] for name in ("pad", "bos", "eos", "unk"))
        self.table, self.unk_id, self._id_of = table, self._unknown, {piece: id for id, piece in enumerate(table)}
        ends = [sum(sizes[: count + 1]) for count in range(len(sizes))]
        protos = [rest[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self._models = [sentencepiece.SentencePieceProcessor(model_proto=proto) for proto in protos]
        special = {*parts["special"]}
        return [(b"", piece) if id in special else _row(piece) for id, piece in enumerate(table)]


def _row(piece: str) -> Row:
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)]), piece
    text = piece.replace(SPACE, " ")
    return text.encode(), printable_piece(text)


def table_of_xlm_roberta(model: bytes, size: int) -> list[str]:
    """The piece of each id of XLM-R's tokenizer: its four special tokens, the model's other pieces, and a mask.

    Args:
        size: Number of rows of the weights.
    """
    import sentencepiece

    stated = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces = map(stated.id_to_piece, range(stated.get_piece_size()))
    return filled([*XLM_SPECIAL, *(piece for piece in pieces if piece not in XLM_SPECIAL), "<mask>"], size)


def filled(table: Sequence[str], size: int) -> list[str]:
    """Extends a table with names for the rows of the weights that have no piece."""
    return [*table, *(UNUSED.format(id) for id in range(len(table), min(size, MAX_PIECES)))]
