"""N-grams of captions as integer arrays, and the scores that count them: BLEU and CIDEr."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Tokens = Sequence[str]

MAX_N = 4
_SHIFT = 31


class Entries(NamedTuple):
    """The distinct n-grams of every caption and their counts.

    The number of an n-gram is a multiple of four plus n - 1, which encodes its order.

    Shapes:
        captions, grams, counts (E,), sorted by caption; lengths (R,)
    """

    captions: Ints
    grams: Ints
    counts: Ints
    lengths: Ints

    @property
    def orders(self) -> Ints:
        """n - 1 of every n-gram (E,)."""
        return self.grams % MAX_N


def sum_by_order(rows: Ints, orders: Ints, weights: Floats | Ints, count: int) -> Floats:
    """Sums weights by row and by order of n-gram.

    Shapes:
        rows, orders, weights (E,) -> (count, 4)
    """
    sums = np.bincount(rows * MAX_N + orders, weights=weights, minlength=count * MAX_N)
    return sums.astype(np.float64).reshape(count, MAX_N)


def lookup(table: Ints, keys: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Binary search: the index of each key in a sorted table, and whether it is present."""
    places = np.searchsorted(table, keys)
    is_present = np.zeros(len(keys), bool)
    in_range = places < len(table)
    is_present[in_range] = table[places[in_range]] == keys[in_range]
    return places, is_present


class Vocabulary:
    """Assigns numbers to n-grams, n from 1 to 4.

    Args:
        captions: The tokenized captions whose n-grams are learned.
    """

    def __init__(self, captions: Sequence[Tokens]) -> None:
        self._words: dict[str, int] = {}
        self._tables: list[Ints] = []
        self.learnt = self._entries(captions)

    @property
    def size(self) -> int:
        """Numbers from this on do not belong to learned n-grams."""
        return MAX_N * max(1, len(self._words), *map(len, self._tables))

    def encode(self, captions: Sequence[Tokens]) -> Entries:
        """N-grams of other captions; unknown ones get numbers that are valid within the result only."""
        return self._entries(captions, learning=False)

    def _entries(self, captions: Sequence[Tokens], learning: bool = True) -> Entries:
        lengths = np.fromiter(map(len, captions), np.int64, len(captions))
        owners = np.repeat(np.arange(len(captions)), lengths)
        words = self._word_numbers(list(chain.from_iterable(captions)), learning)
        # Number of words from each position to the end of its caption: an n-gram needs at least n.
        remaining = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(words))
        places, numbers = np.arange(len(words)), words
        caption_parts, grams = [owners], [numbers * MAX_N]
        for n in range(2, MAX_N + 1):
            longer = remaining[places] >= n
            places, prefixes = places[longer], numbers[longer]
            numbers = self._gram_numbers(n, (prefixes << _SHIFT) | words[places + n - 1], learning)
            caption_parts.append(owners[places])
            grams.append(numbers * MAX_N + n - 1)
        return _count(np.concatenate(caption_parts), np.concatenate(grams), lengths)

    def _word_numbers(self, words: list[str], learning: bool) -> Ints:
        numbers = self._words if learning else dict(self._words)
        for word in dict.fromkeys(words):
            numbers.setdefault(word, len(numbers))
        return np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))

    def _gram_numbers(self, n: int, keys: Ints, learning: bool) -> Ints:
        if learning:
            table, numbers = np.unique(keys, return_inverse=True)
            self._tables.append(table)
            return numbers
        table = self._tables[n - 2]
        numbers, is_present = lookup(table, keys)
        numbers[~is_present] = len(table) + np.unique(keys[~is_present], return_inverse=True)[1]
        return numbers


def _count(captions: Ints, grams: Ints, lengths: Ints) -> Entries:
    stride = int(grams.max(initial=0)) + 1
    keys, counts = np.unique(captions * stride + grams, return_counts=True)
    return Entries(keys // stride, keys % stride, counts, lengths)


class ReferenceCounts:
    """The n-grams of the references of every image.

    Attributes:
        image_of: The image of each caption (R,).
        first: The first caption of each image (N,).
        entries: Entries of all references, sorted by image, then n-gram.
        corpus: Entries of the corpus.
        group_grams: The n-gram of each group (G,).
        group_starts: The first entry of each group, and the end of the last (G + 1,).

    Args:
        references: Tokenized captions of each image, at least one each.
        corpus: Further token sequences to learn: the n-grams of a stored corpus.
    """

    def __init__(self, references: Sequence[Sequence[Tokens]], corpus: Sequence[Tokens] = ()) -> None:
        per_image = np.fromiter(map(len, references), np.int64, len(references))
        if len(per_image) == 0 or per_image.min() == 0:
            raise ValueError("every image needs a reference, and there must be an image")
        self.image_of = np.repeat(np.arange(len(per_image)), per_image)
        self.first = np.cumsum(per_image) - per_image
        captions = list(chain.from_iterable(references))
        self.vocabulary = Vocabulary([*captions, *corpus])
        owners, grams, counts, lengths = self.vocabulary.learnt
        end, stop = int(np.searchsorted(owners, len(captions))), len(captions)
        self.corpus = Entries(owners[end:] - stop, grams[end:], counts[end:], lengths[stop:])
        keys = self.image_of[owners[:end]] * self.vocabulary.size + grams[:end]
        order = np.argsort(keys, kind="stable")
        self.entries = Entries(owners[order], grams[order], counts[order], lengths[:stop])
        self._group_keys, starts = np.unique(keys[order], return_index=True)
        self.group_starts = np.append(starts, len(order))
        self.group_grams = self._group_keys % self.vocabulary.size

    def find(self, images: Ints, grams: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """The group of each (image, n-gram), and whether the image's references contain it."""
        learnt = grams < self.vocabulary.size
        groups, is_present = lookup(self._group_keys, images * self.vocabulary.size + grams * learnt)
        return groups, is_present & learnt


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
        groups, is_present = self._references.find(candidates.captions, candidates.grams)
        matched = np.zeros(len(groups), np.int64)
        matched[is_present] = np.minimum(candidates.counts[is_present], self._most[groups[is_present]])
        count = len(candidates.lengths)
        correct = sum_by_order(candidates.captions, candidates.orders, matched, count)
        lengths = candidates.lengths
        return BleuCounts(correct, _count_guesses(lengths), lengths, self._closest(lengths))

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
        return bleu_of(correct, images * _count_guesses(candidates.lengths), images * candidates.lengths, closest[rows])

    def _closest(self, lengths: Ints) -> Ints:
        reference_lengths, image_of = self._references.entries.lengths, self._references.image_of
        stride = int(reference_lengths.max()) + 1
        ranks = np.abs(reference_lengths - lengths[image_of]) * stride + reference_lengths
        return np.minimum.reduceat(ranks, self._references.first) % stride


def _count_guesses(lengths: Ints) -> Ints:
    return np.maximum(lengths[:, None] - np.arange(MAX_N), 0)


def bleu_of(correct: Floats, guessed: Ints | Floats, length: Ints | Floats, closest: Ints | Floats) -> Floats:
    """BLEU-1 to BLEU-4 from counts of one image or sums over a corpus.

    Shapes:
        correct and guessed (..., 4), lengths (...) -> (..., 4)
    """
    precision = np.cumprod((correct + _TINY) / (guessed + _SMALL), axis=-1) ** (1 / np.arange(1, MAX_N + 1))
    ratio = (np.asarray(length) + _TINY) / (np.asarray(closest) + _SMALL)
    return precision * np.exp(np.minimum(1 - 1 / ratio, 0))[..., None]


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
    def from_references(cls, references: Iterable[Sequence[Tokens]]) -> Self:
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
            corpus = references.corpus
            # Each sequence that was learnt is one n-gram of the corpus: the entry of its own length.
            is_complete = corpus.orders + 1 == corpus.lengths[corpus.captions]
            counts = np.fromiter(frequencies.counts.values(), float, len(frequencies.counts))
            documents = np.zeros(references.vocabulary.size)
            documents[corpus.grams[is_complete]] = counts[corpus.captions[is_complete]]
        self._idf = self._rarest - np.log(np.maximum(documents, 1.0))
        self._weights = entries.counts * self._idf[entries.grams]
        count = len(references.image_of)
        self._norms = np.sqrt(sum_by_order(entries.captions, entries.orders, self._weights**2, count))
        self._shares = 1.0 / np.bincount(references.image_of)

    def __call__(self, candidates: Entries) -> Floats:
        """Scores one caption per image: (N,). The corpus score is their mean."""
        image_of = self._references.image_of
        weights, norms = self._weigh(candidates)
        groups, is_present = self._references.find(candidates.captions, candidates.grams)
        # All entries of each group: the group's place in `starts`, and the entry.
        starts, stops = (self._references.group_starts[groups[is_present] + end] for end in (0, 1))
        sizes = stops - starts
        rows = np.repeat(np.arange(len(starts)), sizes)
        expanded = np.arange(len(rows)) + np.repeat(starts - np.cumsum(sizes) + sizes, sizes)
        candidate_weights, reference_weights = weights[is_present][rows], self._weights[expanded]
        entries = self._references.entries
        products = np.minimum(candidate_weights, reference_weights) * reference_weights
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
            cosines[rows] = self._clipped_cosines(used, int(times), length_of, len(lengths))[columns]
        norms = norms[candidates.captions, candidates.orders][:, None]
        cosines = np.divide(cosines, norms, out=np.zeros_like(cosines), where=norms != 0)
        cosines *= _penalty(candidates.lengths[candidates.captions][:, None], lengths)
        sums = np.bincount(candidates.captions, cosines.sum(1), len(candidates.lengths))
        return 10 * sums / MAX_N / len(self._references.first)

    def _clipped_cosines(self, used: Ints, times: int, length_of: Ints, lengths: int) -> Floats:
        """Contributions of n-grams with this count, summed over references, by n-gram and length: (used, lengths)."""
        entries = self._references.entries
        column = np.full(self._references.vocabulary.size, -1)
        column[used[used < len(column)]] = np.flatnonzero(used < len(column))
        matching = np.flatnonzero(column[entries.grams] >= 0)
        captions, grams, weights = entries.captions[matching], entries.grams[matching], self._weights[matching]
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


def _penalty(lengths: Ints, reference_lengths: Ints) -> Floats:
    # COCO's evaluation uses the number of bigrams as the length of a caption.
    gap = np.maximum(lengths - 1, 0) - np.maximum(reference_lengths - 1, 0)
    return np.exp(-(gap.astype(float) ** 2) / (2 * _SIGMA**2))
