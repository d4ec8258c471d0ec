"""Splits raw text into words, similar to the Penn Treebank (Taylor et al. 2003)."""

import re

# In this order: URLs and addresses without trailing punctuation, @names and #topics, a word before n't, contractions,
# numbers with inner signs, abbreviations, words, runs of points or hyphens, other signs.
_WORDS = re.compile(
    r"""(?:https?://|www\.)\S*[^\s.,;:!?'"’”)\]>] | [\w.+-]+@[\w-]+(?:\.[\w-]+)+ | [@\#]\w+
    | \w+?(?=n['’]t\b) | n['’]t\b | ['’](?:s|re|ve|ll|d|m)\b
    | \d+(?:[.,:/-]\d+)* | (?:[^\W\d_]\.){2,} | \w+ | \.{2,} | -{2,} | \S""",
    re.VERBOSE | re.IGNORECASE,
)


def split_words(text: str) -> list[str]:
    """The words of raw text.

    Punctuation marks, n't, 's, 're, 've, 'll, 'd and 'm are separate words; URLs, addresses, @names, #topics, numbers
    with signs and abbreviations with points are not split.
    """
    return _WORDS.findall(text)
