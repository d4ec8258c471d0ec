"""BLEU of tokenized captions (Papineni et al. 2002), with the conventions of COCO's evaluation."""

from typing import NamedTuple

import numpy as np

from vlm.evaluation.metrics.ngrams import MAX_N, Entries, Floats, Ints, ReferenceCounts, sum_by_order

# COCO's evaluation raises the numerator and the denominator of every ratio by these, so that it never divides by 0.
_TINY, _SMALL = 1e-15, 1e-9


class BleuCounts(NamedTuple):
    """N-gram counts and lengths per image; corpus BLEU is computed from their sums.

    Shapes:
        correct, guessed (N, 4), lengths and closest (N,)
    """

    correct: Floats
    guessed: Ints
    lengths: Ints
    closest: Ints


class Bleu:
    """BLEU-1 to BLEU-4 against the references of a set of images.

    Matches of an n-gram are clipped to its maximum count in one reference. The brevity penalty uses the reference of
    the closest length, the shorter one of two equally close.

    Args:
        references: The counted references.
    """

    def __init__(self, references: ReferenceCounts) -> None:
        self._references = references
        self._most = np.maximum.reduceat(references.entries.counts, references.group_starts[:-1])

    def __call__(self, candidates: Entries) -> tuple[Floats, Floats]:
        """Scores one caption per image.

        Returns:
            BLEU of the corpus (4,), and of each image (N, 4).
        """
        counts = self.count(candidates)
        return bleu_of(*(np.sum(part, 0) for part in counts)), bleu_of(*counts)

    def count(self, candidates: Entries) -> BleuCounts:
        """Counts one caption per image."""
        groups, known = self._references.find(candidates.captions, candidates.grams)
        matched = np.zeros(len(groups), np.int64)
        matched[known] = np.minimum(candidates.counts[known], self._most[groups[known]])
        count = len(candidates.lengths)
        correct = sum_by_order(candidates.captions, candidates.orders, matched, count)
        lengths = candidates.lengths
        return BleuCounts(correct, _guessed(lengths), lengths, self._closest(lengths))

    def of_constants(self, candidates: Entries) -> Floats:
        """Corpus BLEU of each caption if it were given for every image. Shapes: C candidates -> (C, 4)."""
        size = self._references.vocabulary.size
        learnt = candidates.grams < size
        matched = np.zeros(len(learnt), np.int64)
        for times in np.unique(candidates.counts[learnt]):
            rows = learnt & (candidates.counts == times)
            clipped = np.minimum(self._most, times)
            matched[rows] = np.bincount(self._references.group_grams, clipped, size)[candidates.grams[rows]]
        lengths, rows = np.unique(candidates.lengths, return_inverse=True)
        images = len(self._references.first)
        closest = np.array([self._closest(np.full(images, length)).sum() for length in lengths], np.int64)
        correct = sum_by_order(candidates.captions, candidates.orders, matched, len(candidates.lengths))
        return bleu_of(correct, images * _guessed(candidates.lengths), images * candidates.lengths, closest[rows])

    def _closest(self, lengths: Ints) -> Ints:
        own, image_of = self._references.entries.lengths, self._references.image_of
        stride = int(own.max()) + 1
        ranks = np.abs(own - lengths[image_of]) * stride + own
        return np.minimum.reduceat(ranks, self._references.first) % stride


def _guessed(lengths: Ints) -> Ints:
    return np.maximum(lengths[:, None] - np.arange(MAX_N), 0)


def bleu_of(correct: Floats, guessed: Ints | Floats, length: Ints | Floats, closest: Ints | Floats) -> Floats:
    """BLEU-1 to BLEU-4 from counts of one image or sums over a corpus.

    Shapes:
        correct and guessed (..., 4), lengths (...) -> (..., 4)
    """
    precision = np.cumprod((correct + _TINY) / (guessed + _SMALL), axis=-1) ** (1 / np.arange(1, MAX_N + 1))
    ratio = (np.asarray(length) + _TINY) / (np.asarray(closest) + _SMALL)
    return precision * np.exp(np.minimum(1 - 1 / ratio, 0))[..., None]
