"""Options that state what a text must match: a JSON schema, a regular expression or a list of texts."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal
from weakref import WeakKeyDictionary

from vlm.errors import UserError
from vlm.inference.options import GRAMMAR_NAMES, Option

if TYPE_CHECKING:
    from vlm.data.text.tokenizer import Tokenizer
    from vlm.decoding.grammar import Grammar, Vocabulary

MAX_FILE = 2**20  # bytes of a schema's file
PROBES = 256  # tokens that are decoded to compare texts with the bytes of tokens
# Options that a grammar excludes, because a text could meet only one of the two.
EXCLUDED = ("prefix", "min_tokens", "no_repeat_ngram", "ban", "require")


class SchemaFromFile(dict[str, Any]):
    """A JSON schema that was read from a file.

    Attributes:
        path: The file.
    """

    path: str


def read_schema(path: str) -> SchemaFromFile:
    """Reads a JSON schema.

    Raises:
        UserError: The file cannot be read, or holds no JSON object.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE + 1)
        if len(content) > MAX_FILE:
            raise UserError(f"--json-schema {path}: has more than {MAX_FILE:,} bytes; give a smaller schema")
        schema = json.loads(content)
    except OSError as fault:
        raise UserError(f"--json-schema {path}: cannot be read ({fault.strerror}); give a file") from fault
    except (ValueError, RecursionError) as fault:
        raise UserError(f"--json-schema {path}: is not JSON ({fault}); correct the file") from fault
    if not isinstance(schema, dict):
        raise UserError(f"--json-schema {path}: is not a JSON object; give a JSON schema")
    read = SchemaFromFile(schema)
    read.path = path
    return read


@dataclass(kw_only=True)
class GrammarOptions:
    """Options on what a text must match; at most one of them."""

    json_schema: Annotated[
        dict[str, Any] | None,
        Option("Write JSON that is valid for this JSON schema.", metavar="FILE", cli_type=str, convert=read_schema),
    ] = None
    regex: Annotated[
        str | None, Option("Write text that matches this regular expression from beginning to end.", metavar="PATTERN")
    ] = None
    choice: Annotated[
        list[str] | None, Option("Write this text, or another one of --choice. Repeatable.", metavar="TEXT")
    ] = None

    def files(self) -> list[str]:
        """Returns the files that are read for the options; outputs may not replace them."""
        return [self.json_schema.path] if isinstance(self.json_schema, SchemaFromFile) else []

    def build_grammar(
        self, tokenizer: "Tokenizer", ends: Sequence[int], *, removed: Literal["none", "space", "any"] | None = None
    ) -> "Grammar | None":
        """Returns the grammar of texts; None without one.

        Args:
            ends: Tokens that end a text.
            removed: White space that may precede the text, as in `GrammarSource`; default what decoding removes.
        Raises:
            UserError: Several grammars are given, one is not supported, or another option excludes it.
        """
        given = [name for name in GRAMMAR_NAMES if getattr(self, name) is not None]
        if not given:
            return None
        flag, *more = (f"--{name.replace('_', '-')}" for name in given)
        excluded = [f"--{name.replace('_', '-')}" for name in EXCLUDED if getattr(self, name, None)]
        if conflicts := [*more, *excluded]:
            raise UserError(f"{flag} and {conflicts[0]} exclude each other; give one of them")
        from vlm.decoding.grammar import GrammarSource

        value = getattr(self, given[0])
        content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        tokens = _tokens_of(tokenizer, flag)
        if removed is None:
            removed = "space" if tokens.strips_space else "none"
        source = GrammarSource(given[0], content, removed)  # type: ignore[arg-type]
        return tokens.vocabulary(ends).compile(source)


class _Tokens:
    """The tokens of a tokenizer, as grammars need them.

    Attributes:
        strips_space: Whether decoding removes a space at the beginning of a text.
        joins_bytes: Whether a text otherwise consists of the bytes of its tokens.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        ids = range(tokenizer.vocab_size)
        self.bytes = [b"" if id == tokenizer.unk_id else tokenizer.bytes_of(id) for id in ids]
        self._vocabularies: dict[tuple[int, ...], Vocabulary] = {}
        self._lock = Lock()
        words = [id for id in ids if _is_text(self.bytes[id])]
        probes = words[:: 1 + len(words) // PROBES]
        pairs = [read for id in probes for read in ([id], [words[0], id])]
        decoded = [(tokenizer.decode(read), b"".join(self.bytes[id] for id in read).decode()) for read in pairs]
        self.strips_space = any(text.startswith(" ") and not read.startswith(" ") for read, text in decoded)
        self.joins_bytes = all(read in (text, text.removeprefix(" "), text.strip(" ")) for read, text in decoded)

    def vocabulary(self, ends: Sequence[int]) -> "Vocabulary":
        """Returns the vocabulary with these end tokens; it is built once."""
        from vlm.decoding.grammar import Vocabulary

        with self._lock:
            if tuple(ends) not in self._vocabularies:
                self._vocabularies[tuple(ends)] = Vocabulary(self.bytes, ends)
            return self._vocabularies[tuple(ends)]


def _is_text(content: bytes) -> bool:
    """Returns True if bytes are characters."""
    try:
        return bool(content.decode())
    except UnicodeDecodeError:
        return False


_cache: "WeakKeyDictionary[Tokenizer, _Tokens]" = WeakKeyDictionary()
_cache_lock = Lock()


def _tokens_of(tokenizer: "Tokenizer", flag: str) -> _Tokens:
    """Returns the tokens of a tokenizer, which are read once.

    Raises:
        UserError: Its texts are not the joined bytes of their tokens.
    """
    with _cache_lock:
        tokens = _cache.get(tokenizer)
        if tokens is None:
            tokens = _cache[tokenizer] = _Tokens(tokenizer)
    if not tokens.joins_bytes:
        raise UserError(f"{flag}: this model's tokenizer adds spaces to texts, which no grammar can cover; remove it")
    return tokens
