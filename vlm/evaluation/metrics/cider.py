"""CIDEr of tokenized captions (Vedantam et al. 2015) as in COCO's evaluation: CIDEr-D of the paper."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Self

import numpy as np

from vlm.evaluation.metrics.ngrams import MAX_N, Entries, Floats, Ints, ReferenceCounts, Tokens, sum_by_order

# Standard deviation of the length penalty, in words.
_SIGMA = 6.0


class DocumentFrequencies(NamedTuple):
    """Number of images of a corpus in which each n-gram occurs, for scores that do not depend on the scored images.

    Args:
        images: Number of images of the corpus.
        counts: Number of images with a reference that contains the n-gram, keyed by its words joined with spaces.
    """

    images: int
    counts: Mapping[str, int]

    @classmethod
    def of(cls, references: Iterable[Sequence[Tokens]]) -> Self:
        """Counts a corpus, given the tokenized captions of each of its images."""
        images, counts = 0, dict[str, int]()
        for captions in references:
            images += 1
            for gram in set(chain.from_iterable(map(_grams, captions))):
                counts[gram] = counts.get(gram, 0) + 1
        return cls(images, counts)

    def among(self, captions: Iterable[Tokens]) -> Self:
        """Frequencies of the n-grams of some captions only; scores of these captions stay the same."""
        grams = set(chain.from_iterable(map(_grams, captions)))
        # Sorted, because floating-point sums depend on the order.
        return type(self)(self.images, {gram: self.counts[gram] for gram in sorted(grams & self.counts.keys())})


def _grams(tokens: Tokens) -> Iterable[str]:
    words = " ".join(tokens).split()
    return (" ".join(words[i : i + n]) for n in range(1, MAX_N + 1) for i in range(len(words) - n + 1))


class Cider:
    """CIDEr against the references of a set of images.

    N-grams are weighted by TF-IDF over images. A score is ten times the mean over references and over n from 1 to 4 of
    the cosine similarity, with the candidate's weights clipped to the reference's, times a Gaussian of the length
    difference.

    Args:
        references: The counted references; with ``frequencies``, they must include its n-grams, in its order.
        frequencies: Document frequencies of a corpus; default those of the references.
    """

    def __init__(self, references: ReferenceCounts, frequencies: DocumentFrequencies | None = None) -> None:
        self._references = references
        entries = references.entries
        images = frequencies.images if frequencies else len(references.first)
        self._rarest = np.log(float(images))
        documents = np.bincount(references.group_grams, minlength=references.vocabulary.size).astype(float)
        if frequencies:
            documents = _documents(references, frequencies)
        self._idf = self._rarest - np.log(np.maximum(documents, 1.0))
        self._weights = entries.counts * self._idf[entries.grams]
        count = len(references.image_of)
        self._norms = np.sqrt(sum_by_order(entries.captions, entries.orders, self._weights**2, count))
        self._shares = 1.0 / np.bincount(references.image_of)

    def __call__(self, candidates: Entries) -> Floats:
        """Scores one caption per image: (N,). The corpus score is their mean."""
        image_of = self._references.image_of
        weights, norms = self._weigh(candidates)
        groups, known = self._references.find(candidates.captions, candidates.grams)
        rows, expanded = _expand(self._references.group_starts, groups[known])
        own, theirs = weights[known][rows], self._weights[expanded]
        entries = self._references.entries
        products = np.minimum(own, theirs) * theirs
        cosines = sum_by_order(entries.captions[expanded], entries.orders[expanded], products, len(image_of))
        norms = norms[image_of] * self._norms
        cosines = np.divide(cosines, norms, out=cosines, where=norms != 0)
        similarities = cosines.mean(1) * _penalty(candidates.lengths[image_of], entries.lengths)
        return 10 * np.bincount(image_of, similarities) * self._shares

    def of_constants(self, candidates: Entries) -> Floats:
        """Corpus CIDEr of each caption if it were given for every image. Shapes: C candidates -> (C,)."""
        _, norms = self._weigh(candidates)
        lengths, length_of = np.unique(self._references.entries.lengths, return_inverse=True)
        cosines = np.zeros((len(candidates.grams), len(lengths)))
        for times in np.unique(candidates.counts):
            rows = candidates.counts == times
            used, columns = np.unique(candidates.grams[rows], return_inverse=True)
            cosines[rows] = self._clipped(used, int(times), length_of, len(lengths))[columns]
        own = norms[candidates.captions, candidates.orders]
        cosines = np.divide(cosines, own[:, None], out=np.zeros_like(cosines), where=own[:, None] != 0)
        cosines *= _penalty(candidates.lengths[candidates.captions][:, None], lengths)
        sums = np.bincount(candidates.captions, cosines.sum(1), len(candidates.lengths))
        return 10 * sums / MAX_N / len(self._references.first)

    def _clipped(self, used: Ints, times: int, length_of: Ints, lengths: int) -> Floats:
        """Contributions of n-grams with this count, summed over references, by n-gram and length: (used, lengths)."""
        entries = self._references.entries
        column = np.full(self._references.vocabulary.size, -1)
        column[used[used < len(column)]] = np.flatnonzero(used < len(column))
        kept = np.flatnonzero(column[entries.grams] >= 0)
        captions, grams, weights = entries.captions[kept], entries.grams[kept], self._weights[kept]
        products = np.minimum(times * self._idf[grams], weights) * weights
        norms = self._norms[captions, grams % MAX_N]
        products = np.divide(products, norms, out=np.zeros_like(products), where=norms != 0)
        products *= self._shares[self._references.image_of[captions]]
        cells = column[grams] * lengths + length_of[captions]
        return np.bincount(cells, products, len(used) * lengths).astype(np.float64).reshape(len(used), lengths)

    def _weigh(self, candidates: Entries) -> tuple[Floats, Floats]:
        """Weights of the n-grams (E,) and their norms by caption and order (R, 4)."""
        learnt = candidates.grams < len(self._idf)
        weights = candidates.counts * np.where(learnt, self._idf[candidates.grams * learnt], self._rarest)
        squares = sum_by_order(candidates.captions, candidates.orders, weights**2, len(candidates.lengths))
        return weights, np.sqrt(squares)


def _documents(references: ReferenceCounts, frequencies: DocumentFrequencies) -> Floats:
    documents = np.zeros(references.vocabulary.size)
    others = references.others
    # Each sequence that was learnt is one n-gram of the corpus: the entry of its own length.
    whole = others.orders + 1 == others.lengths[others.captions]
    counts = np.fromiter(frequencies.counts.values(), float, len(frequencies.counts))
    documents[others.grams[whole]] = counts[others.captions[whole]]
    return documents


def _expand(starts: Ints, groups: Ints) -> tuple[Ints, Ints]:
    """Expands groups to their entries: returns the index of the group in the argument, and the entry."""
    sizes = starts[groups + 1] - starts[groups]
    rows = np.repeat(np.arange(len(groups)), sizes)
    return rows, np.arange(len(rows)) + np.repeat(starts[groups] - np.cumsum(sizes) + sizes, sizes)


def _penalty(lengths: Ints, others: Ints) -> Floats:
    # COCO's evaluation uses the number of bigrams as the length of a caption.
    gap = np.maximum(lengths - 1, 0) - np.maximum(others - 1, 0)
    return np.exp(-(gap.astype(float) ** 2) / (2 * _SIGMA**2))
