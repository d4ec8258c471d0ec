"""Raw text split into words by one stated rule, near that of the Penn Treebank (Taylor et al. 2003)."""

import re

# In this order: addresses without the punctuation after them, names and topics of messages, a word before its n't, the
# ends that contractions split off, words with inner points, hyphens of numbers and commas of figures, and any other
# sign by itself.
_WORDS = re.compile(
    r"""(?:https?://|www\.)\S*[^\s.,;:!?'"’”)\]>] | [\w.+-]+@[\w-]+(?:\.[\w-]+)+ | [@\#]\w+
    | \w+?(?=n['’]t\b) | n['’]t\b | ['’](?:s|re|ve|ll|d|m)\b
    | \d+(?:[.,:/-]\d+)* | (?:[^\W\d_]\.){2,} | \w+ | \.{2,} | -{2,} | \S""",
    re.VERBOSE | re.IGNORECASE,
)


def split_words(text: str) -> list[str]:
    """The words of raw text.

    Punctuation stands alone; n't, 's, 're, 've, 'll, 'd and 'm are words of their own; addresses, @names, #topics,
    numbers with their signs and abbreviations with points stay whole.
    """
    return _WORDS.findall(text)
