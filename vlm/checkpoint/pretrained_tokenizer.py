"""The tokenizer of a pretrained model for fine-tuning, also of a folder without a model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from vlm.checkpoint.file import is_specified, locate
from vlm.checkpoint.load import read
from vlm.data.text.hugging_face import MARIAN, MODELS, PLAIN_FILES, XLM, read_tokenizer
from vlm.data.text.library import PieceModelTokenizer
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.data.text.tokenizer_base import Row, Tokenizer
from vlm.errors import UserError
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.opened import is_published, is_supported, opened

WHOLE, SETTINGS = "tokenizer.json", ("tokenizer_config.json", "special_tokens_map.json")
FILES = (WHOLE, *SETTINGS, *PLAIN_FILES, *MODELS, MARIAN[0], XLM)
# Keys of the settings that name each special token, the first that has a value first.
NAMES = {"eos": ("eos_token", "sep_token"), "bos": ("bos_token", "cls_token"), "pad": ("pad_token",)}
# Usual names, if there are no settings: those of BERT, RoBERTa, GPT-2, Gemma and Llama 3.
USUAL = {
    "eos": ("[SEP]", "</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>"),
    "bos": ("[CLS]", "<s>", "<|startoftext|>", "<bos>", "<|begin_of_text|>"),
    "pad": ("[PAD]", "<pad>"),
}


class TokenizerFile(Folder):
    """A tokenizer.json under any name, as a folder with the settings beside it.

    Args:
        path: The file.
    """

    def file(self, name: str) -> Path:
        if name == WHOLE:
            return self.path
        return self.path.with_name(name) if name in SETTINGS else self.path / name  # the latter does not exist

    def place(self, name: str) -> str:
        return str(self.file(name))


def is_lone_tokenizer(path: Path) -> bool:
    """Returns True for a JSON file, or a folder with files of a tokenizer."""
    return (path.suffix == ".json" and path.is_file()) or any((path / name).is_file() for name in FILES)


def read_lone_tokenizer(path: Path) -> Tokenizer:
    """Reads a folder or a tokenizer.json.

    The begin and the end of a text are the tokenizer's bos_token and eos_token, or else its cls_token and sep_token. A
    tokenizer without a begin or padding uses its end token.

    Raises:
        UserError: It is damaged, has no end token, or a part of it cannot be represented; the message names the part.
    """
    try:
        return _read(path, TokenizerFile(path) if path.is_file() else Folder(path))
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as fault:
        reason = f"it has no {fault}" if isinstance(fault, KeyError) else fault
        raise UserError(f"{path}: the tokenizer cannot be read ({reason}); save it again") from fault


def _read(path: Path, folder: Folder) -> Tokenizer:
    pieces = _pieces(folder)
    found = {role: _id_of(folder, role, pieces) for role in NAMES}
    if (end := found["eos"]) is None:
        raise UserError(
            f"{path}: the tokenizer has no end token; put eos_token or sep_token into {SETTINGS[0]} beside {WHOLE}"
        )
    ids = {role: end if id is None else id for role, id in found.items()}
    model = next((name for name in MODELS if folder.has(name)), None)
    if model is None or folder.has(WHOLE) or any(map(folder.has, PLAIN_FILES)):
        return read_tokenizer(folder, ids)
    if added := next((piece for piece, id in _added(folder) if pieces.get(piece) != id), None):
        raise UserError(f"{path}: {model} has no piece for the added token {added!r:.40}; save it with {WHOLE}")
    begins = (_settings(folder).get("add_bos_token") is True) and found["bos"] is not None
    starts = [ids["bos"]] if begins else []
    return PieceModelTokenizer.of_file(folder.bytes(model) or b"", size=0, starts=starts, bare=False, **ids)


def _settings(folder: Folder) -> dict[str, Any]:
    """The content of the files that name special tokens, the newer first."""
    files = [file.values for name in SETTINGS if (file := folder.json(name)) is not None]
    return {name: value for values in reversed(files) for name, value in values.items() if value is not None}


def _added(folder: Folder) -> Iterator[tuple[str, int]]:
    """Yields the tokens, with their ids, that the settings add to a vocabulary."""
    listed = _settings(folder).get("added_tokens_decoder") or {}
    for id, token in listed.items() if isinstance(listed, Mapping) else ():
        if id.isdecimal() and isinstance(token, Mapping):
            yield str(token.get("content")), int(id)
    extra = folder.json("added_tokens.json")
    yield from extra.values.items() if extra is not None else ()


def _pieces(folder: Folder) -> dict[str, int]:
    """The id of each piece, as far as special tokens need it.

    Raises:
        UserError: The folder has no vocabulary, as for a tokenizer of bytes or characters.
    """
    if (whole := folder.json(WHOLE)) is not None:
        model = whole.part("model").values.get("vocab")
        own = model.items() if isinstance(model, Mapping) else ((one[0], id) for id, one in enumerate(model or ()))
        added = whole.values.get("added_tokens") or ()
        return {**dict(own), **{token["content"]: token["id"] for token in added}}
    added = dict(_added(folder))
    if (table := folder.json("vocab.json")) is not None:
        return {**table.values, **added}
    if (lines := folder.text("vocab.txt")) is not None:
        return {line.removesuffix("\r"): id for id, line in enumerate(lines.split("\n"))} | added
    if folder.has(XLM):
        return {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    if (model := next(filter(None, map(folder.bytes, MODELS)), None)) is not None:
        import sentencepiece

        stated = sentencepiece.SentencePieceProcessor(model_proto=model)
        return {stated.id_to_piece(id): id for id in range(stated.get_piece_size())}
    kind = _settings(folder).get("tokenizer_class", "its tokenizer")
    raise UserError(
        f"{folder}: {kind!s:.60} has no vocabulary that can be read; give a folder with {WHOLE}, "
        f"{', '.join(PLAIN_FILES)} or a model of SentencePiece"
    )


def _id_of(folder: Folder, role: str, pieces: Mapping[str, int]) -> int | None:
    """The id of a special token by the settings or, if there are none, by its usual names.

    Raises:
        UserError: The settings name a token that the vocabulary lacks.
    """
    settings = _settings(folder)
    for name in NAMES[role]:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            if token not in pieces:
                raise UserError(f"{folder}: its vocabulary has no {token!r:.40}, its {name}; save the tokenizer again")
            return pieces[token]
    usual = () if settings else USUAL[role]
    return next((pieces[piece] for piece in usual if piece in pieces), None)


class PretrainedTokenizer(Tokenizer):
    """The tokenizer of a Hugging Face folder, a checkpoint or a file; a new checkpoint contains it completely.

    Token embeddings from the same source (``init_from``) then keep their meaning.

    Args:
        path: A folder of a model or of a tokenizer alone, a tokenizer.json, a checkpoint or run's folder, or a model of
            SentencePiece (.model).
        mask: Whether a mask id is needed.
    """

    def __init__(self, *, path: str, mask: bool = False) -> None:
        super().__init__()
        self.path, self.needs_mask = path, mask
        self._own: Tokenizer | None = None

    def fit(self, texts: Iterable[str], cache: Path | None = None) -> Self:
        """Reads the files; nothing is learned.

        Raises:
            UserError: They are missing or damaged, or there is no tokenizer or no mask id.
        """
        self._own = own = self._at_path()
        if self.needs_mask and own.mask_id is None:
            raise UserError(f"tokenizer.mask: {self.path} has no mask id; choose another")
        own.add_languages(self._options.pop("languages", ()))
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = own.pad_id, own.bos_id, own.eos_id, own.unk_id
        self._load(own._require_fit())
        return self

    def _at_path(self) -> Tokenizer:
        if Path(self.path).suffix == ".model":
            return PieceModelTokenizer.of_path(Path(self.path))
        place = Path(self.path)
        if is_published(place) and is_supported(folder := opened(place)):
            return read_tokenizer(folder)
        if is_lone_tokenizer(place):
            return read_lone_tokenizer(place)
        found = locate(self.path)
        if not found.is_file() and not is_specified(found):
            what = "has no tokenizer that can be read" if found.exists() else "no such file or folder"
            raise UserError(
                f"tokenizer.path={self.path}: {what}; give a folder that a tokenizer of transformers was saved in, its "
                "tokenizer.json, a SentencePiece .model, a checkpoint or a run"
            )
        state = read(self.path)["vlm"].get("tokenizer")
        if not isinstance(state, dict):
            raise UserError(f"tokenizer.path={self.path}: the checkpoint has no tokenizer; give one of a task of text")
        return tokenizer_from_state(state)

    @property
    def fingerprint(self) -> str:
        return self._read_own().fingerprint

    @property
    def mask_id(self) -> int | None:
        return self._read_own().mask_id

    @property
    def read_begin(self) -> list[int]:
        return self._read_own().read_begin

    @property
    def languages(self) -> Sequence[str]:
        return super().languages if self._own is None else self._own.languages

    @property
    def language_ids(self) -> Sequence[int]:
        return self._read_own().language_ids

    def encode(self, text: str) -> list[int]:
        return self._read_own().encode(text)

    def encode_written(self, text: str) -> list[int]:
        return self._read_own().encode_written(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._read_own().decode(ids)

    def state(self) -> dict[str, object]:
        return self._read_own().state()

    def _build(self, learned: bytes) -> Sequence[Row]:
        return self._read_own()._rows

    def _read_own(self) -> Tokenizer:
        if self._own is None:
            raise RuntimeError("this PretrainedTokenizer has read nothing yet: call fit first")
        return self._own
