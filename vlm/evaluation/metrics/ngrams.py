"""N-grams of captions as integer arrays, counted once for BLEU and CIDEr.

Legend: **N** images, **R** captions of all images together, **E** entries (one for each distinct n-gram of a caption),
**G** groups (one for each distinct n-gram of an image).
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

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
    known = np.zeros(len(keys), bool)
    inside = places < len(table)
    known[inside] = table[places[inside]] == keys[inside]
    return places, known


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
        left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(words))
        places, numbers = np.arange(len(words)), words
        owned, grams = [owners], [numbers * MAX_N]
        for n in range(2, MAX_N + 1):
            longer = left[places] >= n
            places, prefixes = places[longer], numbers[longer]
            numbers = self._gram_numbers(n, (prefixes << _SHIFT) | words[places + n - 1], learning)
            owned.append(owners[places])
            grams.append(numbers * MAX_N + n - 1)
        return _count(np.concatenate(owned), np.concatenate(grams), lengths)

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
        numbers, known = lookup(table, keys)
        numbers[~known] = len(table) + np.unique(keys[~known], return_inverse=True)[1]
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
        group_grams: The n-gram of each group (G,).
        group_starts: The first entry of each group, and the end of the last (G + 1,).

    Args:
        references: Tokenized captions of each image, at least one each.
        others: Further token sequences to learn, such as the n-grams of a stored corpus.
    """

    def __init__(self, references: Sequence[Sequence[Tokens]], others: Sequence[Tokens] = ()) -> None:
        per_image = np.fromiter(map(len, references), np.int64, len(references))
        if len(per_image) == 0 or per_image.min() == 0:
            raise ValueError("every image needs a reference, and there must be an image")
        self.image_of = np.repeat(np.arange(len(per_image)), per_image)
        self.first = np.cumsum(per_image) - per_image
        captions = list(chain.from_iterable(references))
        self.vocabulary = Vocabulary([*captions, *others])
        self.entries, self.others = _split(self.vocabulary.learnt, len(captions))
        self._group()

    def _group(self) -> None:
        captions, grams, counts, lengths = self.entries
        keys = self.image_of[captions] * self.vocabulary.size + grams
        order = np.argsort(keys, kind="stable")
        self.entries = Entries(captions[order], grams[order], counts[order], lengths)
        self._group_keys, starts = np.unique(keys[order], return_index=True)
        self.group_starts = np.append(starts, len(order))
        self.group_grams = self._group_keys % self.vocabulary.size

    def find(self, images: Ints, grams: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """The group of each (image, n-gram), and whether the image's references contain it."""
        learnt = grams < self.vocabulary.size
        groups, known = lookup(self._group_keys, images * self.vocabulary.size + grams * learnt)
        return groups, known & learnt


def _split(entries: Entries, captions: int) -> tuple[Entries, Entries]:
    end = int(np.searchsorted(entries.captions, captions))
    head = Entries(entries.captions[:end], entries.grams[:end], entries.counts[:end], entries.lengths[:captions])
    tail = Entries(
        entries.captions[end:] - captions, entries.grams[end:], entries.counts[end:], entries.lengths[captions:]
    )
    return head, tail
