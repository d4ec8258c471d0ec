"""The metrics of translations, with a word-for-word dictionary as control, and their section of a report."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vlm.data.records import Split
from vlm.evaluation.metrics.bootstrap import Scorer, column_scorer
from vlm.evaluation.metrics.records import SampleMetric
from vlm.evaluation.metrics.texts import NAMES, TextScores

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
        sources = _vocabulary(text for text, _ in rows)
        targets = _vocabulary(translation for _, translation in rows)
        numbers = []
        for text, translation in rows:
            numbers.append(([0, *(sources[word] for word in text)], [targets[word] for word in translation]))
        best, names = _likeliest(numbers, len(targets)), list(targets)
        self._translations = {word: names[best[number]] for word, number in sources.items() if number in best}

    def translate(self, text: str) -> str:
        """Returns the translations of a text's words, in the order of the text."""
        return " ".join(self._translations.get(word, word) for word in words(text))


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
    # Links of each translation's words to its text's, source * size + target, and the places of the former.
    link_parts, place_parts, at = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for text, translation in rows:
        link_parts.append((np.array(text)[:, None] * size + np.array(translation, np.int64) - 1).ravel())
        place_parts.append(np.tile(np.arange(at, at + len(translation)), len(text)))
        at += len(translation)
    links, places = np.concatenate(link_parts), np.concatenate(place_parts)
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


PAIRS = 20_000  # training pairs that the dictionary, a control, is learned from


class TranslatedText(NamedTuple):
    """A text of an evaluation with its translation by the model, and the model's loss on the reference."""

    text: str
    translation: str
    reference: str
    loss: float


class TranslationMetric(SampleMetric[TranslatedText]):
    """Scores of all translations of all processes.

    Attributes:
        scores: Scores of the last `compute`.
        controls: Scores of controls on the same texts.
    """

    kind, unit = TranslatedText, "text"
    scores: TextScores
    controls: dict[str, TextScores]

    def compute(self) -> dict[str, float]:
        """Returns the scores, and ``length_ratio``, the number of words of translations over that of references."""
        _, translations, references, _ = zip(*self.gather(), strict=True)
        self.scores, self.controls = TextScores(translations, references), {}
        lengths = [sum(len(words(text)) for text in texts) for texts in (translations, references)]
        return self.scores.summary | {"length_ratio": lengths[0] / max(1, lengths[1])}

    def dictionary(self, train: Split) -> dict[str, float]:
        """Returns metric@dictionary: the scores of a word-for-word dictionary learned from the training split."""
        dictionary = Dictionary((record["text"], record["translation"]) for record in train.records(PAIRS))
        translations = [dictionary.translate(sample.text) for sample in self.samples.values()]
        self.controls["dictionary"] = TextScores(translations, self.scores.references)
        return {f"{name}@dictionary": value for name, value in self.controls["dictionary"].summary.items()}

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns the scorers of a metric of the model and of a control in `controls`, and the number of texts."""
        place = NAMES.index(metric)
        model, baseline = (column_scorer(scores.score, place) for scores in (self.scores, self.controls[control]))
        return model, baseline, len(self.samples)
