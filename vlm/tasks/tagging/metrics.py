"""Metrics of tagged words: accuracy per word, and precision, recall and F1 of exact spans."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vlm.evaluation.metrics.bootstrap import Scorer, intervals
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import SampleMetric

Tags = Sequence[str]
OUTSIDE = "O"
NAMES = ("word_accuracy", "span_precision", "span_recall", "span_f1")


class Span(NamedTuple):
    """Words from `start` up to `stop` that form one entity of a kind."""

    kind: str
    start: int
    stop: int


class Sentence(NamedTuple):
    """A sentence of an evaluation."""

    words: Sequence[str]
    tags: Tags
    predicted: Tags


def has_spans(tags: Tags) -> bool:
    """Returns True if tags mark spans: each is O, or begins with B- or I-, and some do."""
    return any(tag != OUTSIDE for tag in tags) and all(tag == OUTSIDE or tag[:2] in ("B-", "I-") for tag in tags)


def spans(tags: Tags) -> Iterator[Span]:
    """The spans that B- and I- tags mark, as conlleval and seqeval read them.

    A span begins at B-, or at I- after another kind or O, and continues while tags are I- of its kind.
    """
    start, kind = 0, None
    for place, tag in enumerate((*tags, OUTSIDE)):
        mark, _, own = tag.partition("-")
        if mark == "I" and own == kind:
            continue
        if kind is not None:
            yield Span(kind, start, place)
        start, kind = place, own if tag != OUTSIDE else None


def tag_scorer(true: Sequence[Tags], predicted: Sequence[Tags]) -> Scorer:
    """Returns the scorer of resampled sentences, with scores in the order of NAMES."""
    counts = _counts(true, predicted)
    return lambda draws: _scores(draws @ counts)


def _counts(true: Sequence[Tags], predicted: Sequence[Tags]) -> Floats:
    """Counts of each sentence: right words, words, right spans, predicted spans, spans. Shapes: -> (N, 5)"""
    rows = []
    for tags, taken in zip(true, predicted, strict=True):
        right = sum(one == other for one, other in zip(tags, taken, strict=True))
        both = [set(spans(each)) for each in (tags, taken)]
        rows.append([right, len(tags), len(both[0] & both[1]), len(both[1]), len(both[0])])
    return np.array(rows, np.float64)


def _scores(counts: Floats) -> Floats:
    """Returns scores from sums over sentences; 0 / 0 is 0. Shapes: (R, 5) -> (R, 4)"""
    right, words, both, taken, true = counts.T
    shares = [(right, words), (both, taken), (both, true), (2 * both, taken + true)]
    return np.column_stack([part / np.maximum(whole, 1) for part, whole in shares])


class TaggingMetric(SampleMetric[Sentence]):
    """Scores over all words and spans of all processes; other methods refer to the sentences of the last `compute`.

    Args:
        classes: The tags in training; if they mark spans, these are scored too.
    """

    kind, unit = Sentence, "sentence"

    def __init__(self, *, classes: Tags, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.classes, self.spans = list(classes), has_spans(classes)

    def compute(self) -> dict[str, float]:
        """Returns word_accuracy and, for exact spans of all kinds together, span_precision, span_recall and span_f1.

        Raises:
            UserError: Nothing was added.
        """
        return self.score([sentence.predicted for sentence in self.gather()])

    def score(self, predicted: Sequence[Tags]) -> dict[str, float]:
        """Returns the scores of other tags for the same sentences."""
        values = self._scorer(predicted)(np.ones((1, len(predicted))))[0].tolist()
        return dict(zip(NAMES[: None if self.spans else 1], values, strict=False))

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns word_accuracy and span_f1 at @low and @high: 95% intervals by bootstrap over sentences."""
        score = self._scorer([sentence.predicted for sentence in self.samples.values()])
        places = [0, 3] if self.spans else [0]
        names = [NAMES[place] for place in places]
        return intervals(names, lambda draws: score(draws)[:, places], len(self.samples), seed=seed)

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns precision, recall, F1 and count of the words of each tag, and of the spans of each kind."""
        counts: dict[str, np.ndarray] = {}
        for sentence in self.samples.values():
            for tag, taken in zip(sentence.tags, sentence.predicted, strict=True):
                counts[tag] = counts.get(tag, np.zeros(3)) + np.array([tag == taken, 0, 1])
                counts[taken] = counts.get(taken, np.zeros(3)) + np.array([0, 1, 0])
            if self.spans:
                true, predicted = set(spans(sentence.tags)), set(spans(sentence.predicted))
                for span in true | predicted:
                    row = np.array([span in true and span in predicted, span in predicted, span in true])
                    counts[span.kind] = counts.get(span.kind, np.zeros(3)) + row
        return {name: _figures(*counts[name].tolist()) for name in sorted(counts)}

    def confusion(self) -> tuple[list[list[int]], list[str]]:
        """Returns the confusion matrix, counts by true tag (rows) and predicted tag (columns), and the tags."""
        pairs = [pair for one in self.samples.values() for pair in zip(one.tags, one.predicted, strict=True)]
        names = sorted({tag for pair in pairs for tag in pair})
        place = {name: at for at, name in enumerate(names)}
        matrix = [[0] * len(names) for _ in names]
        for true, taken in pairs:
            matrix[place[true]][place[taken]] += 1
        return matrix, names

    def _scorer(self, predicted: Sequence[Tags]) -> Scorer:
        return tag_scorer([sentence.tags for sentence in self.samples.values()], predicted)


def _figures(both: float, taken: float, true: float) -> dict[str, float]:
    figures = {"precision": both / max(1, taken), "recall": both / max(1, true), "f1": 2 * both / max(1, taken + true)}
    return {**figures, "count": true}
