"""Tokenization of captions as COCO's evaluation does it, without Java."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from vlm.data.text.words import spaceless_pattern
from vlm.evaluation.metrics.ptb_rules import A_DIGIT, A_LETTER, CONTRACTIONS, WORDS_WITH_STOP, outline, scanner, symbols

_PUNCTUATION = frozenset(["''", "'", "``", "`", ".", "?", "!", ",", ":", "-", "--", "...", ";"])
_CONTRACTIONS = frozenset(CONTRACTIONS.split())
_PLAIN = re.compile("[A-Za-z, ]*[.]?[ ]*")
_PLAIN_WORDS = re.compile(f"(?:[A-Za-z{A_LETTER}]+ +)+")
# Parts of a line between spaces whose tokens do not depend on the context. Only tags, and numbers and stops before
# others of their kind, extend across a space; and a single letter with a stop depends on what follows.
_LETTERS = f"A-Za-z{A_LETTER}"
_INDEPENDENT = re.compile(
    f"(?:[^\\s<]{{0,39}}[^\\s<.]|(?:[^\\s<]{{0,39}}[^\\s\\w<.;'`\x91\x92\u2018\u2019\u201b])?[{_LETTERS}]{{2,40}}[.])"
    f"(?= +[^ .0-9{A_DIGIT}]| *\n)"
)


def tokenize(caption: str) -> list[str]:
    """Splits a caption into lower-case tokens without punctuation.

    Args:
        caption: Any text; characters that the reference cannot tokenize, such as emoji, are dropped.
    """
    plain = _tokenize_plain(caption)
    return [token for token in _tokenize(caption) if token not in _PUNCTUATION] if plain is None else plain


def _tokenize_plain(caption: str) -> list[str] | None:
    """Tokens of a caption of plain words, commas and a final full stop; None if other rules may apply."""
    if _PLAIN.fullmatch(caption) is None:
        return None
    words = caption.lower().replace(",", " ").split()
    if words and words[-1].endswith("."):
        last = words.pop()[:-1]
        if len(last) == 1 or last in WORDS_WITH_STOP:
            return None
        words.extend([last] if last else [])
    return words if _CONTRACTIONS.isdisjoint(words) else None


def _tokenize(caption: str) -> list[str]:
    # Rules look at what follows a token, so the line ends with a line feed.
    line = caption + "\n"
    shape, tokens, position = outline(line), list[str](), 0
    while position < len(caption):
        if line[position] == " ":
            position += 1
            continue
        plain = _PLAIN_WORDS.match(shape, position)
        if plain and _CONTRACTIONS.isdisjoint(words := line[position : plain.end()].lower().split()):
            tokens.extend(words)
            position = plain.end()
        elif part := _INDEPENDENT.match(shape, position):
            tokens.extend(_tokenize_part(line[position : part.end()]))
            position = part.end()
        else:
            token, position = _next_token(line, shape, position)
            tokens.append(token)
    return [token for token in tokens if token]


@lru_cache(maxsize=2**15)
def _tokenize_part(part: str) -> list[str]:
    """Tokens of a part of a line that `_INDEPENDENT` matches; cached, because captions repeat the same parts."""
    line = f"{part} x\n"
    shape, tokens, position = outline(line), list[str](), 0
    while position < len(part):
        token, position = _next_token(line, shape, position)
        tokens.append(token)
    return tokens


def _next_token(line: str, shape: str, position: int) -> tuple[str, int]:
    """The token at a position, which may be empty, and the position after it."""
    end, token = _longest_token(line, shape, position)
    return (token.lower() if end > position or token in symbols() else ""), max(end, position + 1)


def _longest_token(line: str, shape: str, position: int) -> tuple[int, str]:
    """End and text of the longest token at a position; the position and its character if no rule matches."""
    match = scanner().longest(shape, position)
    if match is None:
        return position, line[position]
    end, action = match
    return end, action(line[position:end])


@dataclass(frozen=True)
class Units:
    """Tokenization of a metric.

    Args:
        name: "words" or "characters".
        cut: Splits a caption into units, in lower case and without punctuation.
    """

    name: str
    cut: Callable[[str], list[str]]

    @property
    def note(self) -> str:
        """A note for readers of scores; empty for words, which published scores use."""
        return "" if self is WORDS else "scored by characters: the script of the references has no spaces between words"


def characters(caption: str) -> list[str]:
    """Splits text of scripts without spaces into characters with their marks, and other text into words."""
    tokens: list[str] = []
    for part in spaceless_pattern().split(caption):  # includes the captured separators
        tokens += [part] if spaceless_pattern().fullmatch(part) else tokenize(part)
    return [token for token in tokens if any(map(str.isalnum, token))]


WORDS, CHARACTERS = Units("words", tokenize), Units("characters", characters)


def units_of(captions: Iterable[str]) -> Units:
    """The units for a set of captions: characters if most letters are of a script without spaces."""
    letters = unspaced = 0
    for caption in captions:
        letters += sum(map(str.isalpha, caption))
        unspaced += 0 if caption.isascii() else sum(map(str.isalpha, "".join(spaceless_pattern().findall(caption))))
    return CHARACTERS if 2 * unspaced > letters else WORDS
