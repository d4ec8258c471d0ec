"""Bootstrap over samples: confidence intervals and significance of differences (Koehn 2004).

A resample draws as many samples as there are, with replacement, and is stored as counts. Scores that are not means are
computed from sums over samples, so that nothing is counted again.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vlm.evaluation.metrics.coco import CaptionScores
from vlm.evaluation.metrics.ngrams import Floats, bleu_of
from vlm.randomness import numpy_rng

RESAMPLES = 1000
LEVEL = 0.95
_ROUNDING = 1e-9  # differences of sums in another order are smaller
_AT_ONCE = 100  # resamples in memory at once

# Maps counts of each sample in each resample (R, N) to scores (R, M).
Scorer = Callable[[Floats], Floats]


class Difference(NamedTuple):
    """Gain of a second system over a first, with its confidence interval and p-value."""

    value: float
    low: float
    high: float
    p: float


def resamples(samples: int, seed: int, count: int = RESAMPLES) -> Iterator[Floats]:
    """Yields resamples in blocks, as counts (R, N); determined by the number of samples and the seed."""
    rng = numpy_rng("bootstrap", seed, samples)
    share = np.full(samples, 1 / samples)
    for start in range(0, count, _AT_ONCE):
        yield rng.multinomial(samples, share, size=min(_AT_ONCE, count - start)).astype(np.float64)


def intervals(names: Sequence[str], scorer: Scorer, samples: int, *, seed: int) -> dict[str, float]:
    """Returns name@low and name@high: the percentile interval of each score."""
    values = np.concatenate([scorer(draws) for draws in resamples(samples, seed)])  # (R, M)
    ends = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return {
        f"{name}@{end}": float(value)
        for place, name in enumerate(names)
        for end, value in zip(("low", "high"), ends[:, place], strict=True)
    }


def compute_differences(baseline: Scorer, system: Scorer, samples: int, *, seed: int) -> list[Difference]:
    """Returns the differences of two systems on the same resamples (Koehn 2004, section 4), one per score.

    ``p`` is two-sided: twice the share of resamples whose difference has the opposite sign.
    """
    all_samples = np.ones((1, samples))
    values = (system(all_samples) - baseline(all_samples))[0]
    gains = np.concatenate([system(draws) - baseline(draws) for draws in resamples(samples, seed)])
    gains[np.abs(gains) < _ROUNDING] = 0  # of systems that are the same on a resample
    ends = np.quantile(gains, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    # Both counts start at 1, because a finite number of resamples cannot show a probability of 0.
    below, above = ((gains <= 0).sum(0) + 1) / (len(gains) + 1), ((gains >= 0).sum(0) + 1) / (len(gains) + 1)
    p = np.minimum(1, 2 * np.minimum(below, above))
    rows = zip(values.tolist(), ends[0].tolist(), ends[1].tolist(), p.tolist(), strict=True)
    return [Difference(*row) for row in rows]


def mean_scorer(values: Floats) -> Scorer:
    """Means of values by sample. Shapes: values (N, M)"""
    return lambda draws: draws @ values / draws.sum(1, keepdims=True)


def column_scorer(scorer: Scorer, place: int) -> Scorer:
    """One of several scores. Shapes: scorer (R, M), place in M -> (R, 1)"""
    return lambda draws: scorer(draws)[:, [place]]


def ratio_scorer(counts: Floats) -> Scorer:
    """Ratios of two sums over samples, such as right answers over questions. Shapes: counts (N, 2)"""

    def score(draws: Floats) -> Floats:
        parts, totals = (draws @ counts).T
        return (parts / np.maximum(totals, 1))[:, None]

    return score


def caption_scorer(scores: CaptionScores) -> Scorer:
    """COCO's metrics of resampled images, in the order of KEYS.

    BLEU is that of the resampled corpus. CIDEr is the mean over its images, with document frequencies of the whole
    corpus, as in evaluation.
    """
    counts, means = scores.counts, mean_scorer(scores.values[:, -2:])

    def score(draws: Floats) -> Floats:
        bleu = bleu_of(draws @ counts.correct, draws @ counts.guessed, draws @ counts.lengths, draws @ counts.closest)
        return np.column_stack([bleu, means(draws)])

    return score
