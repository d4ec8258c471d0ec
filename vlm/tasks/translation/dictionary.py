"""A word-for-word dictionary, the control of a translation: what is left without order, agreement and context."""

from collections.abc import Iterable, Sequence

import numpy as np

from vlm.evaluation.metrics.ngrams import Ints

ROUNDS = 5


class Dictionary:
    """Translates each word by itself, as the word that most probably stands for it (Brown et al. 1993, model 1).

    Model 1 explains each word of a translation by one word of its text, or by none, wherever they stand; its table of
    probabilities is found by expectation maximisation. A word that it never saw is copied.

    Args:
        pairs: Texts with their translations; words lie between spaces.
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
        """The translations of a text's words, in the order of the text."""
        return " ".join(map(self._word, words(text)))

    def _word(self, word: str) -> str:
        best = self._best.get(self._sources.get(word, 0))
        return word if word not in self._sources or best is None else self._targets[best]


def words(text: str) -> list[str]:
    """The words between spaces; a no-break space is part of one."""
    return [word for word in text.split(" ") if word]


def _vocabulary(texts: Iterable[Sequence[str]]) -> dict[str, int]:
    """Numbers of words, from 1: 0 stands for none."""
    words = dict.fromkeys(word for text in texts for word in text)
    return {word: number for number, word in enumerate(words, start=1)}


def _likeliest(rows: Sequence[tuple[Sequence[int], Sequence[int]]], size: int) -> dict[int, int]:
    """The likeliest translation of each word, from texts and translations in numbers; places in the list of words.

    Args:
        size: Number of words that translations have.
    """
    links, places = _links(rows, size)
    codes, link = np.unique(links, return_inverse=True)
    source, target = np.divmod(codes, size)
    table = np.ones(len(codes))  # P(target | source), but for a factor
    for _ in range(ROUNDS):
        weights = table[link]
        weights /= np.bincount(places, weights)[places]
        counts = np.bincount(link, weights, len(codes))
        table = counts / np.bincount(source, counts)[source]
    order = np.lexsort((table, source))
    return dict(zip(source[order].tolist(), target[order].tolist(), strict=True))  # the last one of a word stays


def _links(rows: Sequence[tuple[Sequence[int], Sequence[int]]], size: int) -> tuple[Ints, Ints]:
    """Each word of a translation with each of its text: source * size + target, and the place of the former."""
    links, places, at = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for source, target in rows:
        links.append((np.array(source)[:, None] * size + np.array(target, np.int64) - 1).ravel())
        places.append(np.tile(np.arange(at, at + len(target)), len(source)))
        at += len(target)
    return np.concatenate(links), np.concatenate(places)
