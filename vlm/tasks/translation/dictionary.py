"""A word-for-word dictionary, the control of translation: it ignores word order, agreement and context."""

from collections.abc import Iterable, Sequence

import numpy as np

from vlm.evaluation.metrics.ngrams import Ints

ROUNDS = 5


class Dictionary:
    """Translates each word separately by its most probable translation (Brown et al. 1993, model 1).

    Model 1 aligns each word of a translation with one word of its text, or with none, at any position. Its table of
    probabilities is fitted by expectation maximisation. Unknown words are copied.

    Args:
        pairs: Texts with their translations; words are separated by spaces.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        rows = [(words(text), words(translation)) for text, translation in pairs]
        self._sources = _vocabulary(text for text, _ in rows)
        self._targets = list(targets := _vocabulary(translation for _, translation in rows))
        numbers = [
            ([0, *(self._sources[word] for word in text)], [targets[word] for word in translation])
            for text, translation in rows
        ]
        self._best = _likeliest(numbers, len(targets))

    def translate(self, text: str) -> str:
        """Returns the translations of a text's words, in the order of the text."""
        return " ".join(map(self._word, words(text)))

    def _word(self, word: str) -> str:
        best = self._best.get(self._sources.get(word, 0))
        return word if word not in self._sources or best is None else self._targets[best]


def words(text: str) -> list[str]:
    """Returns the words between spaces; a no-break space does not separate words."""
    return [word for word in text.split(" ") if word]


def _vocabulary(texts: Iterable[Sequence[str]]) -> dict[str, int]:
    """Numbers words from 1; 0 stands for no word."""
    words = dict.fromkeys(word for text in texts for word in text)
    return {word: number for number, word in enumerate(words, start=1)}


def _likeliest(rows: Sequence[tuple[Sequence[int], Sequence[int]]], size: int) -> dict[int, int]:
    """Returns the likeliest translation of each word as an index, from numbered texts and translations.

    Args:
        size: Number of distinct words in translations.
    """
    links, places = _links(rows, size)
    codes, link = np.unique(links, return_inverse=True)
    source, target = np.divmod(codes, size)
    table = np.ones(len(codes))  # P(target | source), up to a factor
    for _ in range(ROUNDS):
        weights = table[link]
        weights /= np.bincount(places, weights)[places]
        counts = np.bincount(link, weights, len(codes))
        table = counts / np.bincount(source, counts)[source]
    order = np.lexsort((table, source))
    return dict(zip(source[order].tolist(), target[order].tolist(), strict=True))  # the last entry of a word wins


def _links(rows: Sequence[tuple[Sequence[int], Sequence[int]]], size: int) -> tuple[Ints, Ints]:
    """Returns the links of each translation's words to its text's, source * size + target, and the former's places."""
    links, places, at = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for source, target in rows:
        links.append((np.array(source)[:, None] * size + np.array(target, np.int64) - 1).ravel())
        places.append(np.tile(np.arange(at, at + len(target)), len(source)))
        at += len(target)
    return np.concatenate(links), np.concatenate(places)
