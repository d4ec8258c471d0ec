"""The tokenizer of a pretrained model, for fine-tuning."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from vlm.checkpoint.file import locate
from vlm.checkpoint.load import read
from vlm.checkpoint.specification import is_specified
from vlm.data.text.hugging_face import read_tokenizer
from vlm.data.text.library import PieceModelTokenizer
from vlm.data.text.lone_tokenizer import is_lone_tokenizer, read_lone_tokenizer
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.data.text.tokenizer_base import Row, Tokenizer
from vlm.errors import UserError
from vlm.models.pretrained.opened import is_published, is_supported, opened


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
