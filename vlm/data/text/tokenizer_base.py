"""Base of all tokenizers: caching, checkpoint state, and decoding by the bytes of each id."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from vlm.errors import UserError, excerpt, print_error
from vlm.io.files import atomic_write

Row = tuple[bytes, str]  # the bytes of an id, and its printable form

MAX_PIECES = 2**20
MAX_PIECE = 1024  # characters
MASK: Row = (b"", "<mask>")
LOCATION = "<loc{:04}>"  # the name of a location token, as in PaliGemma
LOCATION_NAME = re.compile(r"(<loc[0-9]{4}>)")
MAX_LOCATIONS = 1024
SPACE = "\u2581"  # SentencePiece's mark for a space, indistinguishable from this character in a text


class Tokenizer(ABC):
    """Base of all tokenizers: caching, checkpoint state and decoding; a subclass learns and encodes.

    Attributes:
        pad_id, bos_id, eos_id: Ids of padding, begin and end; they decode to nothing.
        unk_id: Id of unknown text; None if everything can be encoded.
        starts: Ids that a prompt begins with, for tokenizers of pretrained models.
    Args:
        lowercase: Whether to convert texts to lower case first; nothing else is normalised.
        mask: Whether to add a mask id, the last one, for masked language models.
        bare: Whether encoders read texts without a begin id, as in Marian and T5.
    """

    pad_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    unk_id: int | None = None
    starts: Sequence[int] = ()

    def __init__(self, *, lowercase: bool = False, mask: bool = False, bare: bool = False) -> None:
        chosen = {name: True for name, value in (("mask", mask), ("bare", bare)) if value}
        self._options: dict[str, Any] = {"lowercase": lowercase} | chosen
        self._learned: bytes | None = None
        self._rows: Sequence[Row] = ()

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included; may be smaller than requested."""
        self._require_fit()
        return len(self._rows)

    @property
    def mask_id(self) -> int | None:
        """The mask id; None for a tokenizer without one."""
        return self.vocab_size - 1 if "mask" in self._options else None

    @property
    def read_begin(self) -> list[int]:
        """The ids before a text that an encoder reads."""
        return [] if "bare" in self._options else [self.bos_id]

    @property
    def languages(self) -> Sequence[str]:
        """Languages that have a token; empty if the texts' languages are unknown."""
        return self._options.get("languages", ())

    @property
    def language_ids(self) -> Sequence[int]:
        """Ids of the language tokens, which do not occur in encoded texts and decode to nothing."""
        end = self.vocab_size - ("mask" in self._options) - self._options.get("locations", 0)
        return range(end - len(self.languages), end)

    @property
    def location_ids(self) -> range:
        """Ids of the location tokens, <loc0000> and so on, which encoded texts do not have; empty without any."""
        end = self.vocab_size - ("mask" in self._options)
        return range(end - self._options.get("locations", 0), end)

    def add_locations(self, count: int) -> None:
        """Adds so many location tokens, which are coordinates of boxes (Chen et al. 2022, Pix2Seq)."""
        self._options["locations"] = count
        if self._learned is not None:
            self._load(self._learned)

    def add_languages(self, languages: Sequence[str]) -> None:
        """Adds tokens for languages that do not have one."""
        if new := [name for name in dict.fromkeys(languages) if name not in self.languages]:
            self._options["languages"] = [*self.languages, *new]
            if self._learned is not None:
                self._load(self._learned)

    def begin(self, language: str | None = None) -> list[int]:
        """The ids that a text of a language begins with; default the first language's token, or none.

        Raises:
            UserError: The language has no token.
        """
        if language is None:
            return list(self.language_ids[:1])
        if not self.languages:
            raise UserError(f"--language {excerpt(language)}: this model has no language tokens; remove the option")
        if language not in self.languages:
            supported = ", ".join(self.languages)
            raise UserError(f"--language {excerpt(language)}: not supported by this model; choose from {supported}")
        return [self.language_ids[self.languages.index(language)]]

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines encoding and decoding: class, options and learned state."""
        return compute_fingerprint(type(self).__name__, self._options, self._require_fit())

    def fit(self, texts: Iterable[str], cache: Path | None = None) -> Self:
        """Learns from training texts; the result depends only on texts and options.

        Args:
            texts: Texts of the training split, in an order that is the same in every run.
            cache: Folder that caches what was learned, by hash of texts and options.
        Raises:
            UserError: There are no texts, or the vocabulary size does not suit them.
        """
        captions = [self._prepare(text) for text in texts]
        if not captions:
            raise UserError(
                "data: the training split has no text to learn a tokenizer from; add text, or hold out less"
            )
        file = None
        if cache is not None:
            digest = sha256(json.dumps([type(self).__name__, self._recipe()], sort_keys=True).encode())
            for data in map(str.encode, captions):
                digest.update(len(data).to_bytes(8, "little") + data)  # the length tells ("ab", "c") from ("a", "bc")
            file = cache / f"{digest.hexdigest()}.tokenizer"
        if file is None or not self._read(file):
            self._load(self._learn(captions))
            if file is not None:
                self._write(file)
        return self

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special ids.

        Raises:
            UserError: The text contains a lone surrogate, which has no UTF-8 form.
        """

    def encode_located(self, text: str) -> list[int]:
        """Token ids of a text in which names of location tokens, such as <loc0012>, are recognised."""
        if not (locations := self.location_ids):
            return self.encode(text)
        ids: list[int] = []
        for part in filter(None, LOCATION_NAME.split(text)):
            number = int(part[4:8]) if LOCATION_NAME.fullmatch(part) else len(locations)
            ids += [locations[number]] if number < len(locations) else self.encode(part)
        return ids

    def encode_written(self, text: str) -> list[int]:
        """Token ids of a text that a decoder writes; other than `encode`'s if input and output have separate models."""
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special ids are skipped, invalid UTF-8 becomes U+FFFD.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        return b"".join(self._row(id)[0] for id in ids).decode("utf-8", "replace")

    def bytes_of(self, id: int) -> bytes:
        """The bytes that an id stands for; none for a special id."""
        return self._row(id)[0]

    def piece(self, id: int) -> str:
        """Printable form of one id: a space as U+2581, control characters escaped, a fallback byte as <0xE2>."""
        return self._row(id)[1]

    def state(self) -> dict[str, Any]:
        """Plain containers for `tokenizer_from_state`."""
        learned = self._require_fit().decode("latin1")  # torch.load(weights_only=True) refuses empty bytes
        about = {"class": type(self).__name__, "options": dict(self._options)}
        return about | {"learned": learned, "fingerprint": self.fingerprint}

    def _learn(self, captions: Sequence[str]) -> bytes:
        """Learns from prepared texts; returns the state as bytes."""
        raise TypeError(f"{type(self).__name__} learns nothing")

    @abstractmethod
    def _build(self, learned: bytes) -> Sequence[Row]:
        """The row of every id. Raises ValueError or RuntimeError if `learned` is invalid."""

    def _recipe(self) -> dict[str, Any]:
        """Everything in addition to the texts that affects learning."""
        return self._options

    def _load(self, learned: bytes) -> None:
        rows = self._build(learned)
        more = [(b"", f"<{language}>") for language in self._options.get("languages", ())]
        more += [(name.encode(), name) for name in map(LOCATION.format, range(self._options.get("locations", 0)))]
        more += [MASK] if "mask" in self._options else []
        self._rows = [*rows, *more] if more else rows
        self._learned = learned

    def _require_fit(self) -> bytes:
        if self._learned is None:
            raise RuntimeError(f"this {type(self).__name__} is not fitted yet: call fit first")
        return self._learned

    def _row(self, id: int) -> Row:
        # Python would accept a negative id and count from the end.
        if not 0 <= id < len(self._rows):
            raise ValueError(f"token id {id} is outside the vocabulary of {len(self._rows)}")
        return self._rows[id]

    def _prepare(self, text: str) -> str:
        text = text.lower() if self._options["lowercase"] else text
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"{text[error.start]!r}, half of a surrogate pair, which is not a character"
            raise UserError(f"text {text[:40]!r} contains {half}; save its source as UTF-8") from None
        return text

    def _read(self, file: Path) -> bool:
        try:
            fingerprint, _, learned = file.read_bytes().partition(b"\n")
            if fingerprint != compute_fingerprint(type(self).__name__, self._options, learned).encode():
                return False
            self._load(learned)
        except (OSError, ValueError, RuntimeError):
            return False
        return True

    def _write(self, file: Path) -> None:
        try:
            with atomic_write(file) as cached:
                cached.write(self.fingerprint.encode() + b"\n" + self._require_fit())
        except OSError as error:
            # Not an error, because the tokenizer itself is complete.
            print_error(f"{file}: the tokenizer could not be cached ({error.strerror})", "warning")


class GivenTokenizer(Tokenizer):
    """Base of tokenizers whose vocabulary is given."""

    def fit(self, texts: Iterable[str], cache: Path | None = None) -> Self:
        """Does nothing, because the vocabulary is given."""
        self._require_fit()
        return self

    def _load_parts(self, head: Mapping[str, Any], models: bytes) -> None:
        """Loads a state that consists of options and the content of model files."""
        self._load(json.dumps(head, sort_keys=True).encode() + b"\n" + models)


def check_vocabulary(pieces: Sequence[str], ids: Iterable[int]) -> None:
    """Checks the pieces of a vocabulary and some of its ids.

    Raises:
        ValueError: There are too many pieces, one is too long or no text, or an id is outside the vocabulary.
    """
    if not 0 < len(pieces) <= MAX_PIECES or not all(type(piece) is str and len(piece) <= MAX_PIECE for piece in pieces):
        raise ValueError(f"the vocabulary exceeds {MAX_PIECES:,} pieces of {MAX_PIECE:,} characters, or is empty")
    check_ids(ids, len(pieces))


def check_ids(ids: Iterable[int], size: int) -> None:
    if not all(type(id) is int and 0 <= id < size for id in ids):
        raise ValueError("an id is outside the vocabulary")


def compute_fingerprint(name: str, options: dict[str, Any], learned: bytes) -> str:
    more: list[Any] = [name for name in ("mask", "bare") if options.get(name)]
    more += [options["languages"]] if options.get("languages") else []
    more += [{"locations": options["locations"]}] if options.get("locations") else []
    return sha256(json.dumps([name, options["lowercase"], *more]).encode() + b"\0" + learned).hexdigest()


def format_piece(text: str) -> str:
    if not text.isprintable():
        text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text.replace(" ", SPACE)
