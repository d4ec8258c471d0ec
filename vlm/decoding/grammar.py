"""Grammars of generated texts: a JSON schema, a regular expression or a list of texts, enforced by token masks.

The package llguidance matches the bytes of tokens against a grammar (https://github.com/guidance-ai/llguidance).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vlm.decoding.schema import check_schema
from vlm.errors import UserError

MAX_REGEX = 2**13  # characters of a regular expression
MAX_CHOICES = 1024  # texts
MAX_CHOICE = 2**16  # characters of all choices
PARALLEL = 2**17  # tokens of all texts of a step from which threads compute masks
CACHED = 32  # compiled grammars that a vocabulary keeps
# White space between the parts of JSON, and around it. Bounded, so that a model cannot write spaces without end.
JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,20}"
TEXT_SPACE = r"[ \t\r\n]{1,4}"

Matcher: TypeAlias = Any  # llguidance.LLMatcher: the package is optional


@dataclass(frozen=True)
class GrammarSource:
    """What a text must match.

    Args:
        kind: The option that states it.
        content: A JSON schema as JSON, a regular expression, or a JSON list of texts.
        removed: White space that may precede the text, because it is removed: none, one space, or any.
    """

    kind: Literal["json_schema", "regex", "choice"]
    content: str
    removed: Literal["none", "space", "any"] = "none"

    @property
    def option(self) -> str:
        """The option's name on the command line, for messages."""
        return f"--{self.kind.replace('_', '-')}"

    def check(self) -> None:
        """Checks limits that keep compilation short.

        Raises:
            UserError: One is exceeded, or the content is empty.
        """
        if self.kind == "json_schema":
            check_schema(self.content)
        elif self.kind == "regex" and len(self.content) > MAX_REGEX:
            raise UserError(f"--regex: has {len(self.content):,} characters; the maximum is {MAX_REGEX:,}")
        elif self.kind == "choice":
            choices = json.loads(self.content)
            if not 0 < len(choices) <= MAX_CHOICES:
                raise UserError(f"--choice: {len(choices):,} texts; give 1 to {MAX_CHOICES:,}")
            if (total := sum(map(len, choices))) > MAX_CHOICE:
                raise UserError(f"--choice: the texts have {total:,} characters; the maximum is {MAX_CHOICE:,}")
            if "" in choices:
                raise UserError("--choice: a text is empty; give a text, or remove it")

    def to_lark(self) -> str:
        """Returns the grammar in llguidance's variant of Lark."""
        from llguidance import regex_to_lark

        # Without no_forcing, the library would choose the tokens of a text that can go on in one way only.
        space = " " if self.removed == "space" and self.kind != "json_schema" else TEXT_SPACE
        spaces = f'%llguidance {{"no_forcing": true}}\nSPACE: /{space}/'
        if self.kind == "json_schema":
            options = {"whitespace_pattern": JSON_SPACE, "whitespace_flexible": True, "lenient": False}
            schema = json.loads(self.content) | {"x-guidance": options | {"coerce_one_of": False}}
            return f"start: SPACE? body SPACE?\n{spaces}\nbody: %json {json.dumps(schema)}"
        if self.kind == "regex":
            body = f"/{regex_to_lark(self.content, use_ascii='')}/"
        else:
            body = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(self.content))
        return f"start: {'' if self.removed == 'none' else 'SPACE? '}body\n{spaces}\nbody: {body}"


class Grammar:
    """A compiled grammar.

    Args:
        vocabulary: The tokens that texts consist of.
        source: What texts must match.
    Raises:
        UserError: It is not valid or not supported, no text of these tokens matches it, or it exceeds a limit.
    """

    def __init__(self, vocabulary: "Vocabulary", source: GrammarSource) -> None:
        from llguidance import LLMatcher, LLParserLimits

        source.check()
        self.vocabulary, self.source = vocabulary, source
        try:
            # With these limits, schemas of the maximum size compile in about a second, and a step takes milliseconds.
            limits = LLParserLimits(
                max_items_in_row=20_000,
                initial_lexer_fuel=500_000,
                step_lexer_fuel=200_000,
                step_max_items=50_000,
                max_lexer_states=50_000,
                max_grammar_size=200_000,
                verbose_errors=False,
            )
            self._first = LLMatcher(vocabulary.library, source.to_lark(), log_level=0, limits=limits)
            mask = np.zeros(vocabulary.mask_width, np.int32)
            self._first.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as fault:  # a panic in Rust is not an Exception
            raise UserError(f"{source.option}: cannot be used: {_last_line(str(fault))}") from fault
        if "NoExtension" in (reason := _last_line(self._first.get_error())) or not (reason or mask.any()):
            raise UserError(f"{source.option}: matches no text that the model's tokens can write; change it")
        if self._first.is_error():
            raise UserError(f"{source.option}: cannot be used: {reason}; change it, or remove the option")

    def start(self) -> Matcher:
        """Returns a matcher at the beginning of a text."""
        return self._first.deep_copy()

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Returns True if the text of these tokens, without the end token, matches."""
        matcher = self.start()
        return matcher.try_consume_tokens([*tokens]) == len(tokens) and matcher.is_accepting()


def _last_line(reason: str) -> str:
    """Returns the informative line of a message of llguidance, which quotes the grammar around it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[0].replace(" <non-verbose/>", "").rpartition("JSON schema: ")[2]


class Vocabulary:
    """The tokens of a model, as grammars need them, and its compiled grammars.

    Args:
        tokens: The bytes of each token; none for a special token.
        ends: Tokens that end a text.
    Raises:
        UserError: llguidance is not installed.
    """

    def __init__(self, tokens: Sequence[bytes], ends: Sequence[int]) -> None:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as fault:
            needs = "--json-schema, --regex and --choice need the package llguidance"
            raise UserError(f'{needs}; pip install "vlm-lightning[structured]"') from fault
        self.size = len(tokens)
        self.ends = [end for end in dict.fromkeys(ends) if 0 <= end < len(tokens)]
        self.library = LLTokenizer(TokenizerWrapper(_TokenTable(tokens, self.ends)), eos_token=self.ends)
        self.mask_width = -(-self.size // 32)  # words of 32 bits
        self._grammars: dict[GrammarSource, Grammar] = {}
        self._lock = Lock()

    def compile(self, source: GrammarSource) -> Grammar:
        """Compiles a grammar, or returns a compiled one of the last few.

        Raises:
            UserError: As `Grammar`.
        """
        with self._lock:
            grammar = self._grammars.pop(source, None)
        grammar = Grammar(self, source) if grammar is None else grammar
        with self._lock:
            self._grammars[source] = grammar  # the last used one is last
            while len(self._grammars) > CACHED:
                del self._grammars[next(iter(self._grammars))]
        return grammar


class _TokenTable:
    """A tokenizer as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], ends: Sequence[int]) -> None:
        self.special_token_ids = [id for id, content in enumerate(tokens) if not content or id in ends]
        special = {*self.special_token_ids}
        self.tokens = [b"<%d>" % id if id in special else content for id, content in enumerate(tokens)]
        self.eos_token_id = ends[0]
        self._bytes = {content: id for id, content in enumerate(tokens) if len(content) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Splits a text into tokens of one byte each; the library uses it only where grammars force tokens."""
        return [self._bytes[content] for byte in text if (content := bytes([byte])) in self._bytes]


class GrammarStates:
    """The positions of R rows of G texts in their grammars; `begin` starts them.

    Args:
        grammars: The grammar of each row; None for rows without one.
        columns: Number G of texts of a row.
        skipped: Number of leading tokens of each text that grammars do not see, such as a language token.
    """

    def __init__(self, grammars: Sequence[Grammar | None], *, columns: int, skipped: int = 0) -> None:
        self.grammars, self.columns, self.skipped = list(grammars), columns, skipped
        # Of each text: its matcher, None if it has no grammar or has ended.
        self._matchers: list[list[Matcher | None]] = [[None] * columns for _ in grammars]
        self._ages = [0] * len(self.grammars)

    @property
    def rows(self) -> list[bool]:
        """Whether each row has a grammar."""
        return [grammar is not None for grammar in self.grammars]

    def begin(self, rows: Sequence[int]) -> None:
        """Begins new texts in some rows."""
        for row in rows:
            grammar = self.grammars[row]
            self._matchers[row] = [None if grammar is None else grammar.start() for _ in range(self.columns)]
            self._ages[row] = 0

    def read(self, texts: Sequence[Sequence[int]]) -> None:
        """Begins each row with tokens of its text; the rows have one text each."""
        for (matcher,), text in zip(self._matchers, texts, strict=True):
            if matcher is not None:
                matcher.consume_tokens([*text])

    def select(self, rows: Sequence[int]) -> None:
        """Keeps only these rows; a row that is repeated is copied."""
        selected, seen = list[list[Matcher | None]](), set[int]()
        for row in rows:
            matchers = self._matchers[row]
            copied = [matcher and matcher.deep_copy() for matcher in matchers] if row in seen else matchers
            selected.append(copied)
            seen.add(row)
        self._matchers = selected
        self.grammars = [self.grammars[row] for row in rows]
        self._ages = [self._ages[row] for row in rows]

    def append(self, tokens: Sequence[Sequence[int]]) -> None:
        """Appends a token to each text: tokens (R, G)."""
        for row, chosen in enumerate(tokens):
            grammar, matchers = self.grammars[row], self._matchers[row]
            self._ages[row] += 1
            if grammar is None or self._ages[row] <= self.skipped:
                continue
            for column, (token, matcher) in enumerate(zip(chosen, matchers, strict=True)):
                if matcher is None:
                    continue
                if token in grammar.vocabulary.ends:
                    matchers[column] = None
                else:
                    matcher.consume_token(token)  # an error stays in the matcher, whose text can then only end

    def constrain(self, scores: Tensor) -> None:
        """Masks scores in place, with -inf, for tokens that a grammar excludes: scores (R * G, V).

        End tokens are allowed where a text matches, and where no token continues it.
        """
        live = [
            (matcher, row * self.columns + column, grammar)
            for row, grammar in enumerate(self.grammars)
            if grammar is not None and self._ages[row] >= self.skipped
            for column, matcher in enumerate(self._matchers[row])
            if matcher is not None
        ]
        if not live:
            return
        vocabulary = live[0][2].vocabulary
        words = np.full((len(scores), vocabulary.mask_width), -1, np.int32)
        if len(live) * vocabulary.size < PARALLEL:
            for matcher, place, _ in live:
                matcher.unsafe_compute_mask_ptr(words[place].ctypes.data, words.strides[0])
        else:
            _executor().unsafe_compute_mask_ptr(
                [(matcher, place) for matcher, place, _ in live], words.ctypes.data, words.strides[0], len(words)
            )
        bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")  # (R * G, 32 * words)
        allowed = np.ones(scores.shape, np.uint8)
        shared = min(scores.shape[1], vocabulary.size)
        allowed[:, :shared] = bits[:, :shared]
        for matcher, place, _ in live:
            allowed[place, vocabulary.size :] = 0  # rows of the weights that have no token
            allowed[place, vocabulary.ends] = 0
            if matcher.is_accepting() or matcher.is_error() or not allowed[place].any():
                allowed[place] *= not matcher.is_error()
                allowed[place, vocabulary.ends] = 1
        scores.masked_fill_(torch.from_numpy(allowed == 0).to(scores.device), -torch.inf)


@cache
def _executor() -> Any:
    """Returns the threads that compute masks."""
    from llguidance import LLExecutor

    return LLExecutor()
