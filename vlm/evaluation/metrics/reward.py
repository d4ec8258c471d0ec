"""Scores of drawn captions as a reward to train on, and the signs that a model wins it by bad captions."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np

from vlm.errors import UserError
from vlm.evaluation.metrics.cider import DocumentFrequencies
from vlm.evaluation.metrics.coco import KEYS, References
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.tokens import units_of

RARELY = 0.01  # share of a word's uses that end a caption


class CaptionReward:
    """A weighted sum of COCO's metrics, of each caption by itself. CIDEr weighs n-grams by the training captions.

    Args:
        weights: Weight of each metric, out of `KEYS`.
        corpus: Reference captions of each training image.
    Raises:
        UserError: A metric is unknown.
    """

    def __init__(self, weights: Mapping[str, float], corpus: Iterable[Sequence[str]]) -> None:
        if unknown := weights.keys() - set(KEYS):
            raise UserError(f"task.reward: {sorted(unknown)[0]}: unknown; use {', '.join(KEYS)}")
        self.weights, captions = weights, [list(texts) for texts in corpus]
        self.units = units_of(chain.from_iterable(captions))
        self.frequencies = DocumentFrequencies.of([[self.units.cut(text) for text in texts] for texts in captions])

    def __call__(self, captions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Floats:
        """Rewards of K captions of each of B images: (B, K)."""
        texts = map(self.units.cut, chain(chain.from_iterable(captions), chain.from_iterable(references)))
        names = [f"{place:09}" for place in range(len(references))]  # which are sorted
        known = dict(zip(names, references, strict=True))
        prepared = References(known, self.frequencies.among(texts), self.units)
        columns = [dict(zip(names, column, strict=True)) for column in zip(*captions, strict=True)]
        values = np.stack([prepared.score(column).values for column in columns], 1)  # (B, K, 6)
        return values @ np.array([self.weights.get(key, 0.0) for key in KEYS])


class CaptionFaults:
    """Faults of captions that metrics of n-grams reward: words again and again, and ends in the middle of a phrase.

    A caption repeats itself where two words in a row come twice. Its end is bad where its last word ends fewer than one
    in a hundred of the training captions that hold it ("a", "of", "with").

    Args:
        corpus: The training captions.
    """

    def __init__(self, corpus: Iterable[str]) -> None:
        captions = list(corpus)
        self.units, self._used, self._ends = units_of(captions), Counter[str](), Counter[str]()
        for tokens in filter(None, map(self.units.cut, captions)):
            self._used.update(set(tokens))
            self._ends[tokens[-1]] += 1

    def shares(self, captions: Iterable[str]) -> dict[str, float]:
        """Shares of captions with each fault."""
        texts = [self.units.cut(caption) for caption in captions]
        repeated = sum(max(Counter(pairwise(tokens)).values(), default=0) > 1 for tokens in texts)
        ends = sum(not tokens or self._ends[tokens[-1]] < RARELY * self._used[tokens[-1]] for tokens in texts)
        return {"repeated": repeated / max(1, len(texts)), "bad_endings": ends / max(1, len(texts))}
