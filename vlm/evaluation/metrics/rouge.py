"""ROUGE-L of tokenized captions (Lin 2004), with the conventions of COCO's evaluation."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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


def _score(candidate: Tokens, image: _Image) -> float:
    tokens = _or_blank(candidate)
    # A bit is cleared where the subsequence grows by one. The empty bits absorb carries.
    state = image.all_fields
    for word in tokens:
        if places := image.places.get(word):
            matched = state & places
            state = ((state + matched) | (state - matched)) & image.all_fields
    fallen = image.all_fields & ~state
    common = [((fallen & mask).bit_count(), length) for mask, length in image.fields]
    precision = max(count for count, _ in common) / len(tokens)
    recall = max(count / length for count, length in common)
    if precision == 0:
        return 0.0
    return (1 + _BETA**2) * precision * recall / (recall + _BETA**2 * precision)
