"""Units of caption metrics: words, cut as COCO's evaluation does it, or characters where a script has no spaces."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vlm.data.text.scripts import spaceless
from vlm.evaluation.metrics.ptb import tokenize


@dataclass(frozen=True)
class Units:
    """Tokenisation of a metric: its units, words or characters.

    Args:
        name: "words" or "characters".
        cut: Cuts a caption into them, in small letters and without punctuation.
    """

    name: str
    cut: Callable[[str], list[str]]

    @property
    def note(self) -> str:
        """A line for whoever reads the scores; nothing for words, which all scores that are published count."""
        return "" if self is WORDS else "scored by characters: the script of the references has no spaces between words"


def characters(caption: str) -> list[str]:
    """Cuts a caption into characters where its script has no spaces, marks with their base; other parts into words."""
    tokens: list[str] = []
    for part in spaceless().split(caption):  # what separates the parts stands between them
        tokens += [part] if spaceless().fullmatch(part) else tokenize(part)
    return [token for token in tokens if any(map(str.isalnum, token))]


WORDS, CHARACTERS = Units("words", tokenize), Units("characters", characters)


def units_of(captions: Iterable[str]) -> Units:
    """The units of a set of captions: characters where most of their letters are of a script without spaces."""
    letters = alone = 0
    for caption in captions:
        letters += sum(map(str.isalpha, caption))
        alone += 0 if caption.isascii() else sum(map(str.isalpha, "".join(spaceless().findall(caption))))
    return CHARACTERS if 2 * alone > letters else WORDS
