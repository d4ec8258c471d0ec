"""Splits raw text into words, similar to the Penn Treebank (Taylor et al. 2003)."""

import re

import regex

from vlm.data.text.characters import whole

# In this order: URLs and addresses without trailing punctuation, @names and #topics, a word before n't, contractions,
# numbers with inner signs, abbreviations, words, runs of points or hyphens, other signs.
_PATTERN = r"""(?:https?://|www\.)\S*[^\s.,;:!?'"’”)\]>] | [\w.+-]+@[\w-]+(?:\.[\w-]+)+ | [@\#]\w+
    | \w+?(?=n['’]t\b) | n['’]t\b | ['’](?:s|re|ve|ll|d|m)\b
    | \d+(?:[.,:/-]\d+)* | (?:[^\W\d_]\.){2,} | \w+ | \.{2,} | -{2,} | \S"""
_ASCII = re.compile(_PATTERN, re.VERBOSE | re.IGNORECASE)
# The library keeps combining marks with their letter, as in Hindi, but does not count a fraction as part of a word.
_ANY = regex.compile(
    _PATTERN.replace(r"[^\W\d_]", r"[\w\p{No}--[\d_]]").replace(r"\w+", r"[\w\p{No}]+"),
    regex.VERBOSE | regex.IGNORECASE | regex.VERSION1,
)


def split_words(text: str) -> list[str]:
    """The words of raw text.

    Punctuation marks, n't, 's, 're, 've, 'll, 'd and 'm are separate words; URLs, addresses, @names, #topics, numbers
    with signs and abbreviations with points are not split, nor is a grapheme cluster.
    """
    if text.isascii():
        return _ASCII.findall(text)
    return [text[start:stop] for start, stop in whole((match.span() for match in _ANY.finditer(text)), text)]
