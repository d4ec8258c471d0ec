"""Compares the tokenizer of a Hugging Face folder with a run's own, id by id."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vlm.data.text.lines import split_lines
from vlm.data.text.subwords import BYTE_OF
from vlm.errors import UserError
from vlm.models.pretrained.folder import Folder

FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")  # the first existing one


class Decodes(Protocol):
    """The part of a tokenizer that the comparison needs."""

    unk_id: int | None

    @property
    def vocab_size(self) -> int: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def check_tokens(folder: Folder, tokenizer: Decodes) -> None:
    """Checks that each id of a run's tokenizer stands for the same text in a folder's tokenizer, if it has one.

    Raises:
        UserError: An id stands for different texts, or the folder's file cannot be read.
    """
    name = next(filter(folder.has, FILES), None)
    if name is None:
        return
    try:
        theirs = _decoded(_pieces(folder, name))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise UserError(f"{folder.place(name)} cannot be read ({fault!r:.80}); restore the file") from fault
    ours = {id: tokenizer.decode([id]) for id in range(tokenizer.vocab_size)}
    # Special tokens are not compared: they decode to nothing or to a replacement, and their names may differ.
    # SentencePiece drops the space at the beginning of a text.
    same = {id: (text, f" {text}") for id, text in ours.items() if text and id != tokenizer.unk_id}
    wrong = [id for id, texts in same.items() if theirs.get(id) not in texts]
    if wrong:
        id = wrong[0]
        raise UserError(
            f"token {id} is {theirs.get(id)!r:.40} in {folder.place(name)}, and {ours[id]!r:.40} in this run, as are "
            f"{len(wrong):,} of {len(ours):,} others; choose the tokenizer that the weights were trained with"
        )


def _pieces(folder: Folder, name: str) -> dict[int, str]:
    """The piece of each id in a file."""
    if name.endswith(".model"):
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_proto=folder.bytes(name))
        return {id: model.id_to_piece(id) for id in range(model.get_piece_size())}
    if name.endswith(".txt"):
        return dict(enumerate(split_lines(folder.text(name) or "")))
    content = folder.json(name)
    assert content is not None
    vocabulary: Any = content.values
    added: list[Any] = []
    if name == "tokenizer.json":
        added, vocabulary = vocabulary.get("added_tokens", []), vocabulary["model"]["vocab"]
    if isinstance(vocabulary, list):  # a unigram model's, with scores
        vocabulary = {piece: id for id, (piece, _) in enumerate(vocabulary)}
    pieces = {int(id): str(piece) for piece, id in vocabulary.items()}
    return pieces | {int(token["id"]): str(token["content"]) for token in added}


def _decoded(pieces: Mapping[int, str]) -> dict[int, str]:
    """Converts pieces to text: GPT-2's characters for bytes, or SentencePiece's mark for spaces."""
    if any("\u0120" in piece for piece in pieces.values()):  # GPT-2's space
        return {
            id: bytes(BYTE_OF[char] for char in piece).decode("utf-8", "replace")
            if all(char in BYTE_OF for char in piece)
            else piece
            for id, piece in pieces.items()
        }
    return {id: _plain(piece) for id, piece in pieces.items()}


def _plain(piece: str) -> str:
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    return bytes([int(byte[1], 16)]).decode("utf-8", "replace") if byte else piece.replace("\u2581", " ")
