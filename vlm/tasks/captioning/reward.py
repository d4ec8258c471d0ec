"""Scores of sampled captions as a training reward, and signs that a model exploits it with bad captions."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np

from vlm.evaluation.metrics.cider import DocumentFrequencies
from vlm.evaluation.metrics.coco import KEYS, References
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.tokens import units_of

RARELY = 0.01  # a word ends a caption badly if a smaller share of the captions with it end in it
CONSTANT = "cider_constant"
REWARDS = (*KEYS, CONSTANT)
T = TypeVar("T")


class CaptionReward:
    """A weighted sum of COCO's metrics for each single caption. CIDEr weighs n-grams by the training captions.

    A further metric, cider_constant, is a caption's mean CIDEr over all training images. With a negative weight it
    subtracts what the caption would earn for any image (after Wang et al. 2020, "Compare and Reweight", who subtract
    what it earns for similar images).

    Args:
        weights: Weight of each metric in `REWARDS`.
        corpus: Reference captions of each training image.
    """

    def __init__(self, weights: Mapping[str, float], corpus: Iterable[Sequence[str]]) -> None:
        self.weights, known = weights, [list(texts) for texts in corpus]
        self.units = units_of(chain.from_iterable(known))
        self.frequencies = DocumentFrequencies.of([[self.units.cut(text) for text in texts] for texts in known])
        if CONSTANT in weights:
            self._corpus = References(_named(known), units=self.units)

    def __call__(self, captions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Floats:
        """Returns the rewards of K captions of each of B images: (B, K).

        Args:
            references: References of each image.
        """
        weights = np.array([self.weights.get(name, 0.0) for name in KEYS])
        if set(self.weights) <= {"cider", CONSTANT}:
            rewards = self.weights.get("cider", 0.0) * self._scored(captions, references, References.cider)
        else:
            rewards = self._scored(captions, references, lambda known, column: known.score(column).values @ weights)
        if weight := self.weights.get(CONSTANT):
            constants = self._corpus.cider_of_constants(list(chain.from_iterable(captions)))
            rewards += weight * constants.reshape(rewards.shape)
        return rewards

    def _scored(
        self,
        captions: Sequence[Sequence[str]],
        references: Sequence[Sequence[str]],
        score: Callable[[References, Mapping[str, str]], Floats],
    ) -> Floats:
        """Returns the score of each caption: (B, K)."""
        texts = map(self.units.cut, chain(chain.from_iterable(captions), chain.from_iterable(references)))
        prepared = References(_named(references), self.frequencies.among(texts), self.units)
        columns = [_named(column) for column in zip(*captions, strict=True)]
        return np.stack([score(prepared, column) for column in columns], 1)


def _named(values: Sequence[T]) -> dict[str, T]:
    """Returns values by names that sort in their order."""
    return {f"{place:09}": value for place, value in enumerate(values)}


class CaptionFaults:
    """Faults of captions that n-gram metrics reward: repeated words, and ends in the middle of a phrase.

    A caption repeats itself if a pair of adjacent words occurs twice. Its end is bad if its last word ends fewer than
    one in a hundred of the training captions that contain it ("a", "of", "with").

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
        """Returns the share of captions with each fault."""
        texts = [self.units.cut(caption) for caption in captions]
        repeated = sum(max(Counter(pairwise(tokens)).values(), default=0) > 1 for tokens in texts)
        ends = sum(not tokens or self._ends[tokens[-1]] < RARELY * self._used[tokens[-1]] for tokens in texts)
        return {"repeated": repeated / max(1, len(texts)), "bad_endings": ends / max(1, len(texts))}
