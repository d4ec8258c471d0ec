"""Units of caption metrics: words, cut as COCO's evaluation does it, or characters where a script has no spaces."""

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from vlm.evaluation.metrics.ptb import tokenize

# Blocks of scripts that write no spaces between words: Thai, Lao, Burmese, Khmer, kana, bopomofo, Han.
_SPACELESS = """
e00-e7f e80-eff 1000-109f 1780-17ff 19e0-19ff 3005-3007 3041-30ff 3100-312f 31a0-31bf 31f0-31ff 3400-4dbf 4e00-9fff
a9e0-a9ff aa60-aa7f f900-faff ff66-ff9f 1b000-1b16f 20000-323af
"""


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
    for part in _character().split(caption):  # what separates the parts stands between them
        spaceless = _character().fullmatch(part)
        tokens += [part] if spaceless else [word for word in tokenize(part) if any(map(str.isalnum, word))]
    return [token for token in tokens if any(map(str.isalnum, token))]


WORDS, CHARACTERS = Units("words", tokenize), Units("characters", characters)


def units_of(captions: Iterable[str]) -> Units:
    """The units of a set of captions: characters where most of their letters are of a script without spaces."""
    letters = spaceless = 0
    for caption in captions:
        letters += sum(map(str.isalpha, caption))
        spaceless += 0 if caption.isascii() else sum(map(str.isalpha, "".join(_character().findall(caption))))
    return CHARACTERS if 2 * spaceless > letters else WORDS


@cache
def _character() -> re.Pattern[str]:
    """A character of a script without spaces with the marks that follow it, as a group."""
    spans = [span.split("-") for span in _SPACELESS.split()]
    ranges = "".join(f"{chr(int(low, 16))}-{chr(int(high, 16))}" for low, high in spans)
    small = (range(int(low, 16), int(high, 16) + 1) for low, high in spans if int(high, 16) < 0x3400)
    marks = [chr(code) for span in small for code in span if unicodedata.category(chr(code)) in ("Mn", "Mc")]
    return re.compile(f"([{ranges}][{''.join(marks)}\u3099\u309a\ufe00-\ufe0f]*)")
