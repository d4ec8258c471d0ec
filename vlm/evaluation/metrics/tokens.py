"""Units of caption metrics: words as in COCO's evaluation, or characters for scripts without spaces."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vlm.data.text.scripts import spaceless
from vlm.evaluation.metrics.ptb import tokenize


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
    for part in spaceless().split(caption):  # includes the captured separators
        tokens += [part] if spaceless().fullmatch(part) else tokenize(part)
    return [token for token in tokens if any(map(str.isalnum, token))]


WORDS, CHARACTERS = Units("words", tokenize), Units("characters", characters)


def units_of(captions: Iterable[str]) -> Units:
    """The units for a set of captions: characters if most letters are of a script without spaces."""
    letters = alone = 0
    for caption in captions:
        letters += sum(map(str.isalpha, caption))
        alone += 0 if caption.isascii() else sum(map(str.isalpha, "".join(spaceless().findall(caption))))
    return CHARACTERS if 2 * alone > letters else WORDS
