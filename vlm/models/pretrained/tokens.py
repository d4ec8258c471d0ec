"""Comparing the tokenizer of a Hugging Face folder with a run's own, id by id."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from vlm.errors import UserError

FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")  # the first that is there


class Decodes(Protocol):
    """A tokenizer, as far as it takes part in the comparison."""

    unk_id: int | None

    @property
    def vocab_size(self) -> int: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def check_tokens(folder: str, tokenizer: Decodes, key: str) -> None:
    """Refuses a folder whose tokenizer gives an id to another piece of text; one without a tokenizer passes.

    Args:
        key: The key of the config that names the folder.
    Raises:
        UserError: An id stands for different texts, or the folder's file cannot be read.
    """
    path = next((path for path in (Path(folder) / name for name in FILES) if path.is_file()), None)
    if path is None:
        return
    try:
        theirs = _texts(path)
    except (OSError, RecursionError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as fault:
        raise UserError(f"{key}: {path} cannot be read ({fault!r:.80}); restore the file") from fault
    ours = {id: tokenizer.decode([id]) for id in range(tokenizer.vocab_size)}
    # Special tokens decode to nothing, or to a replacement; what they are called is each tokenizer's own affair.
    wrong = [id for id, text in ours.items() if text and id != tokenizer.unk_id and theirs.get(id) != text]
    if wrong:
        id = wrong[0]
        raise UserError(
            f"{key}: token {id} is {theirs.get(id)!r:.40} in {path}, and {ours[id]!r:.40} in this run, as are "
            f"{len(wrong):,} of {len(ours):,} others; choose the tokenizer that the weights were trained with"
        )


def _texts(path: Path) -> dict[int, str]:
    """Id -> text of each token of a file."""
    if path.suffix == ".model":
        import sentencepiece

        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        return _decoded({id: model.id_to_piece(id) for id in range(model.get_piece_size())})
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".txt":
        return _decoded(dict(enumerate(content.splitlines())))
    vocabulary: Any = json.loads(content)
    added: list[Any] = []
    if path.name == "tokenizer.json":
        added, vocabulary = vocabulary.get("added_tokens", []), vocabulary["model"]["vocab"]
    if isinstance(vocabulary, list):  # of a unigram model, with scores
        vocabulary = {piece: id for id, (piece, _) in enumerate(vocabulary)}
    return _decoded({int(id): str(piece) for piece, id in vocabulary.items()}) | {
        int(token["id"]): str(token["content"]) for token in added
    }


def _decoded(pieces: Mapping[int, str]) -> dict[int, str]:
    """Pieces as text: of GPT-2's characters for bytes, or with the marks of SentencePiece."""
    characters = _characters_of_bytes()
    if any("\u0120" in piece for piece in pieces.values()):  # its space
        return {
            id: bytes(characters[char] for char in piece).decode("utf-8", "replace")
            if all(char in characters for char in piece)
            else piece
            for id, piece in pieces.items()
        }
    return {id: _plain(piece) for id, piece in pieces.items()}


def _plain(piece: str) -> str:
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece)
    return bytes([int(byte[1], 16)]).decode("utf-8", "replace") if byte else piece.replace("\u2581", " ")


def _characters_of_bytes() -> dict[str, int]:
    """The character by which GPT-2 writes each byte: itself where it can be seen, else one from 256 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(others)}
