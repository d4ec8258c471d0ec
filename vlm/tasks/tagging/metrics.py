"""Metrics of tagged words: accuracy per word, and precision, recall and F1 of exact spans."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vlm.evaluation.metrics.bootstrap import Scorer, column_scorer, intervals
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


class Scheme(NamedTuple):
    """How tags mark spans.

    Args:
        marks: The letters before the hyphen.
        ends: Those that end a span of several words.
        singles: Those of a span of one word.
    """

    marks: str
    ends: str = ""
    singles: str = ""


IOB = Scheme("BI")
SCHEMES = {"IOB": IOB, "IOBES": Scheme("BIES", "E", "S"), "BILOU": Scheme("BILU", "L", "U")}


def find_scheme(tags: Iterable[str]) -> Scheme | None:
    """Returns the scheme of all tags except O; None if they mark no spans.

    A scheme that ends spans needs tags that begin them: I- and E- alone (IOE) are not supported.
    """
    marks = {tag[0] if tag[1:2] == "-" else "" for tag in tags if tag != OUTSIDE}
    for scheme in SCHEMES.values() if marks else ():
        if marks <= set(scheme.marks) and (scheme is IOB or marks & {"B", scheme.singles}):
            return scheme
    return None


def scheme_note(tags: Iterable[str]) -> str:
    """Returns why tags that look like marks of spans get no span scores; empty for other tags, such as NOUN."""
    marks = sorted({tag[0] for tag in tags if tag[1:2] == "-" and tag[0] in "BIESLUM"})
    if not marks or find_scheme(tags) is not None:
        return ""
    prefixes = ", ".join(f"{mark}-" for mark in marks)
    return (
        f"span scores are left out: tags begin with {prefixes}, and not all tags follow one of the schemes "
        f"{', '.join(SCHEMES)}; convert them to one of these for span_precision, span_recall and span_f1"
    )


def find_spans(tags: Tags, scheme: Scheme = IOB) -> Iterator[Span]:
    """The spans that tags mark, as seqeval reads them: IOB as conlleval does, other schemes strictly.

    In IOB, a span begins at B-, or at I- after another kind or O, and continues while tags are I- of its kind. In the
    other schemes, it is a single word, or words from B- to the next end of its kind with nothing but I- between.
    """
    return _closed_spans(tags, scheme) if scheme.ends else _iob_spans(tags)


def _closed_spans(tags: Tags, scheme: Scheme) -> Iterator[Span]:
    start, kind = 0, None
    for place, tag in enumerate(tags):
        mark, _, tag_kind = tag.partition("-")
        if mark in scheme.singles or (mark in scheme.ends and tag_kind == kind):
            yield Span(tag_kind, place if mark in scheme.singles else start, place + 1)
        if mark == "B":
            start, kind = place, tag_kind
        elif mark != "I" or tag_kind != kind:
            kind = None


def _iob_spans(tags: Tags) -> Iterator[Span]:
    start, kind = 0, None
    for place, tag in enumerate((*tags, OUTSIDE)):
        mark, _, tag_kind = tag.partition("-")
        if mark == "I" and tag_kind == kind:
            continue
        if kind is not None:
            yield Span(kind, start, place)
        start, kind = place, tag_kind if tag != OUTSIDE else None


def tag_scorer(true: Sequence[Tags], predicted: Sequence[Tags], scheme: Scheme | None) -> Scorer:
    """Returns the scorer of resampled sentences, with scores in the order of NAMES.

    Args:
        true: The tags of each sentence.
        predicted: Those of the model.
        scheme: How they mark spans; None if they mark none.
    """
    counts = _counts(true, predicted, scheme or IOB)

    def score(draws: Floats) -> Floats:  # 0 / 0 is 0
        right, words, matched, predicted_spans, true_spans = (draws @ counts).T
        shares = [(right, words), (matched, predicted_spans), (matched, true_spans)]
        shares.append((2 * matched, predicted_spans + true_spans))
        return np.column_stack([part / np.maximum(total, 1) for part, total in shares])

    return score


def _counts(true: Sequence[Tags], predicted: Sequence[Tags], scheme: Scheme) -> Floats:
    """Counts of each sentence: right words, words, right spans, predicted spans, spans. Shapes: -> (N, 5)"""
    rows = []
    for tags, predicted_tags in zip(true, predicted, strict=True):
        right = sum(tag == predicted_tag for tag, predicted_tag in zip(tags, predicted_tags, strict=True))
        span_sets = [set(find_spans(sequence, scheme)) for sequence in (tags, predicted_tags)]
        rows.append([right, len(tags), len(span_sets[0] & span_sets[1]), len(span_sets[1]), len(span_sets[0])])
    return np.array(rows, np.float64)


class TaggingMetric(SampleMetric[Sentence]):
    """Scores over all words and spans of all processes; other methods refer to the sentences of the last `compute`.

    Args:
        classes: The tags in training; if they mark spans, these are scored too.
    Attributes:
        controls: Tags of controls for the sentences of the last `compute`.
    """

    kind, unit = Sentence, "sentence"

    def __init__(self, *, classes: Tags) -> None:
        super().__init__()
        self.classes, self.scheme = list(classes), find_scheme(classes)
        self.controls: dict[str, list[Tags]] = {}

    def compute(self) -> dict[str, float]:
        """Returns word_accuracy and, for exact spans of all kinds together, span_precision, span_recall and span_f1.

        Raises:
            UserError: Nothing was added.
        """
        return self.score([sentence.predicted for sentence in self.gather()])

    def score(self, predicted: Sequence[Tags]) -> dict[str, float]:
        """Returns the scores of other tags for the same sentences."""
        values = self._scorer(predicted)(np.ones((1, len(predicted))))[0].tolist()
        return dict(zip(NAMES[: None if self.scheme else 1], values, strict=False))

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns the scorers of a metric of the model and of a control in `controls`, and the number of sentences."""
        place = NAMES.index(metric)
        sides = [sentence.predicted for sentence in self.samples.values()], self.controls[control]
        model, baseline = (column_scorer(self._scorer(tags), place) for tags in sides)
        return model, baseline, len(self.samples)

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns word_accuracy and span_f1 at @low and @high: 95% intervals by bootstrap over sentences."""
        score = self._scorer([sentence.predicted for sentence in self.samples.values()])
        places = [0, 3] if self.scheme else [0]
        names = [NAMES[place] for place in places]
        return intervals(names, lambda draws: score(draws)[:, places], len(self.samples), seed=seed)

    def per_class(self) -> dict[str, dict[str, float]]:
        """Returns precision, recall, F1 and count of the words of each tag, and of the spans of each kind."""
        counts: dict[str, np.ndarray] = {}
        for sentence in self.samples.values():
            for tag, predicted_tag in zip(sentence.tags, sentence.predicted, strict=True):
                counts[tag] = counts.get(tag, np.zeros(3)) + np.array([tag == predicted_tag, 0, 1])
                counts[predicted_tag] = counts.get(predicted_tag, np.zeros(3)) + np.array([0, 1, 0])
            if self.scheme:
                true, predicted = (set(find_spans(tags, self.scheme)) for tags in (sentence.tags, sentence.predicted))
                for span in true | predicted:
                    row = np.array([span in true and span in predicted, span in predicted, span in true])
                    counts[span.kind] = counts.get(span.kind, np.zeros(3)) + row
        scores = {}
        for name in sorted(counts):
            matched, marked, true = counts[name].tolist()
            recall, f1 = matched / max(1, true), 2 * matched / max(1, marked + true)
            scores[name] = {"precision": matched / max(1, marked), "recall": recall, "f1": f1, "count": true}
        return scores

    def confusion(self) -> tuple[list[list[int]], list[str]]:
        """Returns the confusion matrix, counts by true tag (rows) and predicted tag (columns), and the tags."""
        pairs: list[tuple[str, str]] = []
        for sentence in self.samples.values():
            pairs += zip(sentence.tags, sentence.predicted, strict=True)
        names = sorted({tag for pair in pairs for tag in pair})
        place = {name: at for at, name in enumerate(names)}
        matrix = [[0] * len(names) for _ in names]
        for true, predicted in pairs:
            matrix[place[true]][place[predicted]] += 1
        return matrix, names

    def _scorer(self, predicted: Sequence[Tags]) -> Scorer:
        return tag_scorer([sentence.tags for sentence in self.samples.values()], predicted, self.scheme)
