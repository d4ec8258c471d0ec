"""Lines of text that differ in all that tokenizers treat apart: scripts, digits, spaces, marks, case, code, noise."""

import random
from collections.abc import Callable

SEVERAL = """
The quick brown fox jumps over a lazy dog's back and WE'LL see that it isn't over yet said Mr Holmes
internationalisation pneumonoultramicroscopic x y z naïve café Zürich Straße façade jalapeño coöperate
Ελλάδα ψυχή Привет мир говорит 東京 日本語 中文分词 한국어 대한민국 العربية مرحبا שלום हिन्दी ภาษาไทย ქართული
Հայերեն İstanbul ǅ ﬁne ½ ① Ⅷ e\u0301 A\u030a \u1e9b\u0323 \u212b
"""
WORDS = SEVERAL.split()
PIECES = [
    *("don't", "I'LL", "they've", "'s", "we'd", "O'Neill"),
    *("...", "?!", "--", "—", "“quoted”", "«so»", "(a)", "[b]", "{c}", "#tag", "@name", "50%", "$9.99", "a/b", "C++"),
    *("https://example.org/a?b=c&d=1", "user@example.org", "def f(x): return x**2", "<div class='a'>", "</s>", "<pad>"),
    *("1", "42", "365", "1984", "3.14159", "1,000,000", "007", "１２３", "٤٥٦", "2^10"),
    *("\U0001f642", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "👍🏽", "\u2192", "\u00a0"),
    *("\u200b", "\ufeff", "\u00ad", "\x00", "\x7f", "\u2028", "\ufffd", "\u2581"),
]
SPACES = (" ", " ", " ", " ", "", "  ", "\t", "\n", "\r\n", "   ", "\u3000")


def varied_lines(count: int, *, seed: int = 0) -> list[str]:
    """Lines of up to 40 words, the same for a seed."""
    draw = random.Random(seed)
    return [_line(draw) for _ in range(count)]


def _line(draw: random.Random) -> str:
    kinds: tuple[Callable[[], str], ...] = (
        lambda: draw.choice(WORDS),
        lambda: draw.choice(WORDS).lower(),
        lambda: draw.choice(PIECES),
        lambda: str(draw.randrange(10 ** draw.randint(1, 12))),
        lambda: "".join(draw.choice("etaoinshrdlu") for _ in range(draw.randint(1, 12))),
        lambda: "".join(_character(draw) for _ in range(draw.randint(1, 4))),
    )
    length = draw.choice((0, 1, 3, 8, 20, 40))
    return "".join(draw.choices(kinds, (8, 4, 3, 2, 4, 1))[0]() + draw.choice(SPACES) for _ in range(length))


def _character(draw: random.Random) -> str:
    """Any character that text may hold."""
    code = draw.randrange(0x20, draw.choice((0x80, 0x250, 0x3000, 0xD800, 0x1F700)))
    return chr(code) if not 0xD800 <= code < 0xE000 else "\ue000"
