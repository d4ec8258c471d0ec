"""Metrics of translations: BLEU, chrF, exact match and error rates; exact over any number of processes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from vlm.data.records import Split
from vlm.evaluation.metrics import edits
from vlm.evaluation.metrics.bootstrap import intervals
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import RecordMetric
from vlm.tasks.translation.dictionary import Dictionary, words

NAMES = ("bleu", "chrf", "exact_match", *edits.NAMES)
PAIRS = 20_000  # of train that the dictionary, a control, is learned from
COLUMNS = ("text", "translation", "reference", "loss")  # of a sample


class TranslationScores:
    """Scores of translations: BLEU (Papineni et al. 2002) and chrF (Popović 2015) from 0 to 100 as sacreBLEU computes
    them (Post 2018), cased and with its own tokenization, the share that equal their reference, and error rates of
    characters and words.

    Args:
        predictions, references: One of each a text, two texts or more.
    """

    def __init__(self, predictions: Sequence[str], references: Sequence[str]) -> None:
        self.predictions, self.references = predictions, references
        self._bleu, self._chrf = BLEU(), CHRF()
        self.exact = [one == other for one, other in zip(predictions, references, strict=True)]

    @cached_property
    def summary(self) -> dict[str, float]:
        """The score of all texts under each of ``NAMES``."""
        metrics = (self._bleu, self._chrf)
        scores = [metric.corpus_score(self.predictions, [self.references]).score for metric in metrics]
        errors = edits.error_rates(self._edits.sum(0)).tolist()
        return dict(zip(NAMES, [*scores, float(np.mean(self.exact)), *errors], strict=True))

    def signatures(self) -> dict[str, str]:
        """Everything that decides BLEU and chrF, as sacreBLEU writes it once `summary` is known."""
        return {"bleu": str(self._bleu.get_signature()), "chrf": str(self._chrf.get_signature())}

    def intervals(self, *, seed: int) -> dict[str, float]:
        """metric@low and metric@high: 95% intervals, by bootstrap over texts."""
        return intervals(NAMES, self.score, len(self.predictions), seed=seed)

    def score(self, draws: Floats) -> Floats:
        """Scores of resampled texts, in the order of NAMES. Shapes: draws (R, N) -> (R, 5)"""
        bleu = [_bleu(row) for row in (draws @ self._words).astype(int).tolist()]
        exact = draws @ np.array(self.exact, np.float64) / draws.sum(1)
        return np.column_stack([bleu, _chrf(draws @ self._characters), exact, edits.error_rates(draws @ self._edits)])

    @cached_property
    def _edits(self) -> Floats:
        return edits.error_counts(self.predictions, self.references)

    @cached_property
    def _words(self) -> Floats:
        """Counts that BLEU is computed from: matches and n-grams of each order, both lengths. Shapes: (N, 10)"""
        single = BLEU(effective_order=True)  # or it warns of scores of one text, which are not asked for here
        sentences = (single.sentence_score(one, [other]) for one, other in self._pairs)
        return np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in sentences], np.float64)

    @cached_property
    def _characters(self) -> Floats:
        """Counts that chrF is computed from: n-grams of text and reference, and matches. Shapes: (N, 18)"""
        return np.array([_ngrams(*pair) for pair in self._pairs], np.float64)

    @property
    def _pairs(self) -> Iterable[tuple[str, str]]:
        return zip(self.predictions, self.references, strict=True)


def _bleu(counts: Sequence[int]) -> float:
    correct, total, length, reference = list(counts[:4]), list(counts[4:8]), counts[8], counts[9]
    return BLEU.compute_bleu(correct, total, length, reference, smooth_method="exp").score


def _ngrams(text: str, reference: str) -> list[int]:
    """Character n-grams of a text, of its reference, and of both, orders 1 to 6; white space does not count.

    As in sacreBLEU, those of an order that the reference is too short for do not count.
    """
    counts = []
    for order in range(1, CHRF.CHAR_ORDER + 1):
        one, other = (_counted("".join(side.split()), order) for side in (text, reference))
        counts += [one.total() if other else 0, other.total(), (one & other).total()]
    return counts


def _counted(text: str, order: int) -> Counter[str]:
    return Counter(text[at : at + order] for at in range(len(text) - order + 1))


def _chrf(counts: Floats) -> Floats:
    """chrF of counts, with recall twice as important as precision. Shapes: (R, 18) -> (R,)"""
    text, reference, both = np.moveaxis(counts.reshape(len(counts), -1, 3), 2, 0)  # each (R, 6)
    there = (text > 0) & (reference > 0)
    orders = np.maximum(1, there.sum(1))
    precision = (both / np.maximum(1, text) * there).sum(1) / orders
    recall = (both / np.maximum(1, reference) * there).sum(1) / orders
    return 100 * 5 * precision * recall / np.maximum(1e-16, 4 * precision + recall)


class TranslationMetric(RecordMetric):
    """Scores of all translations of all processes.

    Attributes:
        samples: Of the last `compute`, by id.
        scores: What it found.
    """

    samples: dict[str, dict[str, Any]]
    scores: TranslationScores

    def update(self, rows: Iterable[Sequence[Any]]) -> None:
        """Adds samples: the id, and ``COLUMNS``, the loss being the model's on the reference."""
        self.add(rows)

    def record(self, ids: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[dict[str, Any]]:
        """Adds samples, and returns them with the names of their columns."""
        added = [(id, *row) for id, row in zip(ids, rows, strict=True)]
        self.update(added)
        return [dict(zip(("id", *COLUMNS), row, strict=True)) for row in added]

    def compute(self) -> dict[str, float]:
        """The scores, and ``length_ratio``, that of words of translations and references."""
        self.samples = {id: dict(zip(COLUMNS, row, strict=True)) for id, row in self.rows().items()}
        self.scores = TranslationScores(self._column("translation"), self._column("reference"))
        lengths = [sum(len(words(text)) for text in self._column(name)) for name in ("translation", "reference")]
        return self.scores.summary | {"length_ratio": lengths[0] / max(1, lengths[1])}

    def signatures(self) -> dict[str, str]:
        """As in TranslationScores, of the last `compute`."""
        return self.scores.signatures()

    def intervals(self, *, seed: int) -> dict[str, float]:
        """As in TranslationScores, of the last `compute`."""
        return self.scores.intervals(seed=seed)

    def dictionary(self, train: Split) -> dict[str, float]:
        """metric@dictionary: the scores of a word-for-word dictionary that was learned from the training split."""
        dictionary = Dictionary((record["text"], record["translation"]) for record in train.records(PAIRS))
        translations = [dictionary.translate(text) for text in self._column("text")]
        scores = TranslationScores(translations, self.scores.references).summary
        return {f"{name}@dictionary": value for name, value in scores.items()}

    def _column(self, name: str) -> list[str]:
        return [sample[name] for sample in self.samples.values()]

    def _start(self) -> None:
        super()._start()
        self.samples = {}
