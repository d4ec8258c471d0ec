"""Scripts without spaces between words."""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache

# Blocks of scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana, bopomofo, Han.
_SPACELESS = """
e00-e7f e80-eff 1000-109f 1780-17ff 19e0-19ff 3005-3007 3041-30ff 3100-312f 31a0-31bf 31f0-31ff 3400-4dbf 4e00-9fff
a9e0-a9ff aa60-aa7f f900-faff ff66-ff9f 1b000-1b16f 20000-323af
"""

_WORD = re.compile(r"\w+")


@cache
def spaceless() -> re.Pattern[str]:
    """Matches a character of a script without spaces and its combining marks, as a group."""
    spans = [span.split("-") for span in _SPACELESS.split()]
    ranges = "".join(f"{chr(int(low, 16))}-{chr(int(high, 16))}" for low, high in spans)
    small = (range(int(low, 16), int(high, 16) + 1) for low, high in spans if int(high, 16) < 0x3400)
    marks = [chr(code) for span in small for code in span if unicodedata.category(chr(code)) in ("Mn", "Mc")]
    return re.compile(f"([{ranges}][{''.join(marks)}\u3099\u309a\ufe00-\ufe0f]*)")


def words(text: str) -> Iterator[str]:
    """The words of a text without punctuation; each character of a script without spaces is a word."""
    for part in [text] if text.isascii() else spaceless().split(text):
        yield from [part] if spaceless().fullmatch(part) else _WORD.findall(part)
