"""Scores of texts with one reference each: sacreBLEU's BLEU and chrF, ROUGE, exact match and error rates."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from sacrebleu.metrics import BLEU, CHRF

from vlm.evaluation.metrics import edits
from vlm.evaluation.metrics.bootstrap import intervals
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.rouge import rouge

NAMES = ("bleu", "chrf", "rouge1", "rouge2", "rougeL", "exact_match", *edits.ERROR_RATES)


class TextScores:
    """Scores of texts: BLEU (Papineni et al. 2002) and chrF (Popović 2015) from 0 to 100 as sacreBLEU computes
    them (Post 2018), cased and with its own tokenization; the mean of ROUGE, from 0 to 1; the share that equal their
    reference; and error rates of characters and words.

    Args:
        predictions, references: Texts and their references; at least two.
    """

    def __init__(self, predictions: Sequence[str], references: Sequence[str]) -> None:
        self.predictions, self.references = predictions, references
        self._bleu, self._chrf = BLEU(), CHRF()

    @cached_property
    def summary(self) -> dict[str, float]:
        """The score of all texts under each of ``NAMES``."""
        metrics = (self._bleu, self._chrf)
        scores = [metric.corpus_score(self.predictions, [self.references]).score for metric in metrics]
        errors = edits.error_rates(self._edits.sum(0)).tolist()
        return dict(zip(NAMES, [*scores, *self._shares.mean(0).tolist(), *errors], strict=True))

    def signatures(self) -> dict[str, str]:
        """Returns sacreBLEU's signatures of BLEU and chrF; `summary` must have been computed."""
        return {"bleu": str(self._bleu.get_signature()), "chrf": str(self._chrf.get_signature())}

    def intervals(self, *, seed: int) -> dict[str, float]:
        """metric@low and metric@high: 95% intervals, by bootstrap over texts."""
        return intervals(NAMES, self.score, len(self.predictions), seed=seed)

    def score(self, draws: Floats) -> Floats:
        """Scores of resampled texts, in the order of NAMES. Shapes: draws (R, N) -> (R, 8)"""
        bleu = [_bleu(row) for row in (draws @ self._words).astype(int).tolist()]
        shares, errors = draws @ self._shares / draws.sum(1)[:, None], edits.error_rates(draws @ self._edits)
        return np.column_stack([bleu, _chrf(draws @ self._characters), shares, errors])

    @cached_property
    def _edits(self) -> Floats:
        return edits.error_counts(self.predictions, self.references)

    @cached_property
    def _shares(self) -> Floats:
        """ROUGE and exact match of each text; the scores are their means. Shapes: (N, 4)"""
        return np.array([[*rouge(one, other), one == other] for one, other in self._pairs], np.float64)

    @cached_property
    def _words(self) -> Floats:
        """Counts for BLEU: matches and n-grams of each order, and both lengths. Shapes: (N, 10)"""
        single = BLEU(effective_order=True)  # else it warns about scores of single texts, which are not used
        sentences = (single.sentence_score(one, [other]) for one, other in self._pairs)
        return np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in sentences], np.float64)

    @cached_property
    def _characters(self) -> Floats:
        """Counts for chrF: n-grams of text and reference, and matches. Shapes: (N, 18)"""
        return np.array([_ngrams(*pair) for pair in self._pairs], np.float64)

    @property
    def _pairs(self) -> Iterable[tuple[str, str]]:
        return zip(self.predictions, self.references, strict=True)


def _bleu(counts: Sequence[int]) -> float:
    correct, total, length, reference = list(counts[:4]), list(counts[4:8]), counts[8], counts[9]
    return BLEU.compute_bleu(correct, total, length, reference, smooth_method="exp").score


def _ngrams(text: str, reference: str) -> list[int]:
    """Counts character n-grams of orders 1 to 6 in a text and its reference, and their matches, without white space.

    As in sacreBLEU, the text's n-grams of an order for which the reference is too short do not count.
    """
    counts = []
    for order in range(1, CHRF.CHAR_ORDER + 1):
        one, other = (_counted("".join(side.split()), order) for side in (text, reference))
        counts += [one.total() if other else 0, other.total(), (one & other).total()]
    return counts


def _counted(text: str, order: int) -> Counter[str]:
    return Counter(text[at : at + order] for at in range(len(text) - order + 1))


def _chrf(counts: Floats) -> Floats:
    """Computes chrF from counts, with recall twice as important as precision. Shapes: (R, 18) -> (R,)"""
    text, reference, both = np.moveaxis(counts.reshape(len(counts), -1, 3), 2, 0)  # each (R, 6)
    there = (text > 0) & (reference > 0)
    orders = np.maximum(1, there.sum(1))
    precision = (both / np.maximum(1, text) * there).sum(1) / orders
    recall = (both / np.maximum(1, reference) * there).sum(1) / orders
    return 100 * 5 * precision * recall / np.maximum(1e-16, 4 * precision + recall)
