"""ROUGE (Lin 2004): for captions as in COCO's evaluation, for other texts as in the package rouge-score."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vlm.data.text.scripts import words
from vlm.evaluation.metrics.ngrams import Floats, Tokens

# Weight of recall against precision, as in COCO's evaluation.
_BETA = 1.2


class _Image(NamedTuple):
    """The references of an image in the bits of one integer, separated by an empty bit."""

    places: dict[str, int]
    fields: list[tuple[int, int]]
    all_fields: int


class RougeL:
    """ROUGE-L against the references of a set of images.

    An F-measure of the best precision and the best recall, which may come from different references. Longest common
    subsequences with all references of an image are computed together, with one bit per word (Hyyrö 2004, "Bit-parallel
    LCS-length computation revisited").

    Args:
        references: Tokenized captions of each image.
    """

    def __init__(self, references: Sequence[Sequence[Tokens]]) -> None:
        self._images = [_pack(captions) for captions in references]

    def __call__(self, candidates: Sequence[Tokens]) -> Floats:
        """Scores one caption per image: (N,)."""
        return np.array([_score(tokens, image) for tokens, image in zip(candidates, self._images, strict=True)])


def _or_blank(tokens: Tokens) -> Tokens:
    # COCO's evaluation treats a caption without words as one empty word, so that two such captions agree.
    return tokens or [""]


def _pack(captions: Sequence[Tokens]) -> _Image:
    places: dict[str, int] = {}
    fields: list[tuple[int, int]] = []
    start = 0
    for tokens in map(_or_blank, captions):
        for place, word in enumerate(tokens, start):
            places[word] = places.get(word, 0) | 1 << place
        fields.append((((1 << len(tokens)) - 1) << start, len(tokens)))
        start += len(tokens) + 1
    return _Image(places, fields, sum(mask for mask, _ in fields))


def _common(tokens: Tokens, image: _Image) -> list[tuple[int, int]]:
    """Lengths of the longest common subsequence with each reference, and of the reference."""
    # A bit is cleared where the subsequence grows by one. The empty bits absorb carries.
    state = image.all_fields
    for word in tokens:
        if places := image.places.get(word):
            matched = state & places
            state = ((state + matched) | (state - matched)) & image.all_fields
    fallen = image.all_fields & ~state
    return [((fallen & mask).bit_count(), length) for mask, length in image.fields]


def _score(candidate: Tokens, image: _Image) -> float:
    tokens = _or_blank(candidate)
    common = _common(tokens, image)
    precision = max(count for count, _ in common) / len(tokens)
    recall = max(count / length for count, length in common)
    if precision == 0:
        return 0.0
    return (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)


def rouge(text: str, reference: str) -> tuple[float, float, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L: F1 of the words, pairs of words and longest common subsequence of two texts.

    Words are lower-case runs of letters and digits, unstemmed; for a script without spaces they are its characters.
    """
    one, other = (list(words(side.lower().replace("_", " "))) for side in (text, reference))
    ((longest, _),) = _common(one, _pack([other]))
    shares = [2 * longest / max(1, len(one) + len(other))]
    for n in (2, 1):
        ngrams, wanted = _ngrams(one, n), _ngrams(other, n)
        shares.insert(0, 2 * (ngrams & wanted).total() / max(1, ngrams.total() + wanted.total()))
    first, second, third = shares
    return first, second, third


def _ngrams(tokens: Tokens, n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1))
