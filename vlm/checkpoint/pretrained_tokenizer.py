"""The tokenizer of a pretrained model for fine-tuning, also from a folder without a model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

from vlm.checkpoint.file import is_specified, locate
from vlm.checkpoint.load import read
from vlm.data.text.hugging_face import MARIAN, MODELS, PLAIN_FILES, XLM, read_tokenizer
from vlm.data.text.library import PieceModelTokenizer
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.data.text.tokenizer_base import Row, Tokenizer
from vlm.errors import UserError
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import is_published, open_folder

TOKENIZER_JSON, SETTINGS = "tokenizer.json", ("tokenizer_config.json", "special_tokens_map.json")
FILES = (TOKENIZER_JSON, *SETTINGS, *PLAIN_FILES, *MODELS, MARIAN[0], XLM)
# Keys of the settings that name each special token, the first that has a value first.
TOKEN_KEYS = {"eos": ("eos_token", "sep_token"), "bos": ("bos_token", "cls_token"), "pad": ("pad_token",)}
# Usual names, if there are no settings: those of BERT, RoBERTa, GPT-2, Gemma and Llama 3.
USUAL_TOKENS = {
    "eos": ("[SEP]", "</s>", "<|endoftext|>", "<eos>", "<|end_of_text|>"),
    "bos": ("[CLS]", "<s>", "<|startoftext|>", "<bos>", "<|begin_of_text|>"),
    "pad": ("[PAD]", "<pad>"),
}


class TokenizerFile(Folder):
    """A tokenizer.json of any name, as a folder with the settings next to it.

    Args:
        path: The file.
    """

    def file(self, name: str) -> Path:
        if name == TOKENIZER_JSON:
            return self.path
        return self.path.with_name(name) if name in SETTINGS else self.path / name  # the latter does not exist

    def display_path(self, name: str) -> str:
        return str(self.file(name))


def read_tokenizer_files(path: Path, folder: Folder) -> Tokenizer:
    """Reads a tokenizer from a folder of its files.

    The begin and the end of a text are the tokenizer's bos_token and eos_token, or else its cls_token and sep_token. A
    tokenizer without a begin or padding uses its end token.

    Args:
        path: The folder or the tokenizer.json, for messages.
    Raises:
        UserError: It has no end token, or a part of it cannot be represented; the message names the part.
        AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError: It is damaged.
    """
    pieces = _read_pieces(folder)
    special = {role: _find_special_id(folder, role, pieces) for role in TOKEN_KEYS}
    if (end := special["eos"]) is None:
        raise UserError(
            f"{path}: the tokenizer has no end token; add eos_token or sep_token to {SETTINGS[0]} next to "
            f"{TOKENIZER_JSON}"
        )
    ids = {role: end if id is None else id for role, id in special.items()}
    model = next((name for name in MODELS if folder.has_file(name)), None)
    if model is None or folder.has_file(TOKENIZER_JSON) or any(map(folder.has_file, PLAIN_FILES)):
        return read_tokenizer(folder, ids)
    if added := next((piece for piece, id in _list_added_tokens(folder) if pieces.get(piece) != id), None):
        raise UserError(
            f"{path}: {model} has no piece for the added token {added!r:.40}; save it with {TOKENIZER_JSON}"
        )
    begins = (_read_settings(folder).get("add_bos_token") is True) and special["bos"] is not None
    starts = [ids["bos"]] if begins else []
    return PieceModelTokenizer.of_file(folder.read_bytes(model) or b"", size=0, starts=starts, bare=False, **ids)


def _read_settings(folder: Folder) -> dict[str, Any]:
    """Reads the files that name special tokens; the newer has precedence."""
    files = [file.values for name in SETTINGS if (file := folder.read_json(name)) is not None]
    return {name: value for values in reversed(files) for name, value in values.items() if value is not None}


def _list_added_tokens(folder: Folder) -> Iterator[tuple[str, int]]:
    """Yields the tokens, with their ids, that the settings add to a vocabulary."""
    listed = _read_settings(folder).get("added_tokens_decoder") or {}
    for id, token in listed.items() if isinstance(listed, Mapping) else ():
        if id.isdecimal() and isinstance(token, Mapping):
            yield str(token.get("content")), int(id)
    extra = folder.read_json("added_tokens.json")
    yield from cast(Mapping[str, int], extra.values).items() if extra is not None else ()


def _read_pieces(folder: Folder) -> dict[str, int]:
    """Reads the id of each piece, as far as special tokens need it.

    Raises:
        UserError: The folder has no vocabulary, as for a tokenizer of bytes or characters.
    """
    if (content := folder.read_json(TOKENIZER_JSON)) is not None:
        vocab: Any = content.part("model").values.get("vocab")  # a list of pieces with scores for Unigram
        ids = vocab.items() if isinstance(vocab, Mapping) else ((row[0], id) for id, row in enumerate(vocab or ()))
        listed: Any = content.values.get("added_tokens") or ()
        return {**dict(ids), **{token["content"]: token["id"] for token in listed}}
    added = dict(_list_added_tokens(folder))
    if (table := folder.read_json("vocab.json")) is not None:
        return {**cast(Mapping[str, int], table.values), **added}
    if (lines := folder.read_text("vocab.txt")) is not None:
        return {line.removesuffix("\r"): id for id, line in enumerate(lines.split("\n"))} | added
    if folder.has_file(XLM):
        return {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    if (model := next(filter(None, map(folder.read_bytes, MODELS)), None)) is not None:
        import sentencepiece

        stated = sentencepiece.SentencePieceProcessor(model_proto=model)
        return {stated.id_to_piece(id): id for id in range(stated.get_piece_size())}
    kind = _read_settings(folder).get("tokenizer_class", "its tokenizer")
    raise UserError(
        f"{folder}: {kind!s:.60} has no supported vocabulary; give a folder with {TOKENIZER_JSON}, "
        f"{', '.join(PLAIN_FILES)} or a SentencePiece model"
    )


def _find_special_id(folder: Folder, role: str, pieces: Mapping[str, int]) -> int | None:
    """Finds the id of a special token by the settings or, without settings, by its usual names.

    Raises:
        UserError: The settings name a token that the vocabulary lacks.
    """
    settings = _read_settings(folder)
    for name in TOKEN_KEYS[role]:
        token = settings.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            if token not in pieces:
                raise UserError(f"{folder}: its vocabulary has no {token!r:.40}, its {name}; save the tokenizer again")
            return pieces[token]
    usual = () if settings else USUAL_TOKENS[role]
    return next((pieces[piece] for piece in usual if piece in pieces), None)


class PretrainedTokenizer(Tokenizer):
    """The tokenizer of a Hugging Face folder, a checkpoint or a file; a new checkpoint contains it completely.

    Token embeddings from the same source (``init_from``) then keep their meaning.

    Args:
        path: A folder with a model or only a tokenizer, a tokenizer.json, a checkpoint, a run's folder, or a
            SentencePiece .model.
        mask: Whether a mask id is needed.
    """

    def __init__(self, *, path: str, mask: bool = False) -> None:
        super().__init__()
        self.path, self.needs_mask = path, mask
        self._loaded: Tokenizer | None = None

    def fit(self, texts: Iterable[str], cache: Path | None = None) -> Self:
        """Reads the files; nothing is learned.

        Raises:
            UserError: They are missing or damaged, or there is no tokenizer or no mask id.
        """
        self._loaded = loaded = self._read_path()
        if self.needs_mask and loaded.mask_id is None:
            raise UserError(f"tokenizer.mask: {self.path} has no mask id; choose another")
        loaded.add_languages(self._options.pop("languages", ()))
        if locations := self._options.pop("locations", 0):
            loaded.add_locations(locations)
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = loaded.pad_id, loaded.bos_id, loaded.eos_id, loaded.unk_id
        self._load(loaded._require_fit())
        return self

    def _read_path(self) -> Tokenizer:
        if Path(self.path).suffix == ".model":
            return PieceModelTokenizer.of_path(Path(self.path))
        place = Path(self.path)
        if is_published(place) and (folder := open_folder(place)).is_supported:
            return read_tokenizer(folder)
        is_file = place.suffix == ".json" and place.is_file()
        if is_file or any((place / name).is_file() for name in FILES):
            try:
                return read_tokenizer_files(place, TokenizerFile(place) if is_file else Folder(place))
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as fault:
                reason = f"it has no {fault}" if isinstance(fault, KeyError) else fault
                raise UserError(f"{place}: the tokenizer cannot be read ({reason}); save it again") from fault
        path = locate(self.path)
        if not path.is_file() and not is_specified(path):
            what = "has no supported tokenizer" if path.exists() else "no such file or folder"
            raise UserError(
                f"tokenizer.path={self.path}: {what}; give a folder with a tokenizer saved by transformers, a "
                "tokenizer.json, a SentencePiece .model, a checkpoint or a run"
            )
        state = read(self.path)["vlm"].get("tokenizer")
        if not isinstance(state, dict):
            raise UserError(f"tokenizer.path={self.path}: the checkpoint has no tokenizer; give one of a task of text")
        return tokenizer_from_state(state)

    @property
    def fingerprint(self) -> str:
        return self._require_loaded().fingerprint

    @property
    def mask_id(self) -> int | None:
        return self._require_loaded().mask_id

    @property
    def read_begin(self) -> list[int]:
        return self._require_loaded().read_begin

    @property
    def languages(self) -> Sequence[str]:
        return super().languages if self._loaded is None else self._loaded.languages

    @property
    def language_ids(self) -> Sequence[int]:
        return self._require_loaded().language_ids

    @property
    def location_ids(self) -> range:
        return self._require_loaded().location_ids

    def encode(self, text: str) -> list[int]:
        return self._require_loaded().encode(text)

    def encode_written(self, text: str) -> list[int]:
        return self._require_loaded().encode_written(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._require_loaded().decode(ids)

    def state(self) -> dict[str, object]:
        return self._require_loaded().state()

    def _build(self, learned: bytes) -> Sequence[Row]:
        return self._require_loaded()._rows

    def _require_loaded(self) -> Tokenizer:
        if self._loaded is None:
            raise RuntimeError("this PretrainedTokenizer is not loaded: call fit first")
        return self._loaded
