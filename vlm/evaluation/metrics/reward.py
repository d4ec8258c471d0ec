"""Scores of drawn captions as a reward to train on, and the signs that a model wins it by bad captions."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np

from vlm.errors import UserError
from vlm.evaluation.metrics.cider import DocumentFrequencies
from vlm.evaluation.metrics.coco import KEYS, References
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.tokens import units_of
from vlm.randomness import key

RARELY = 0.01  # share of a word's uses that end a caption
BETWEEN = "cider_between"


class CaptionReward:
    """A weighted sum of COCO's metrics, of each caption by itself. CIDEr weighs n-grams by the training captions.

    One more, cider_between, is CIDEr against the captions of another training image, drawn for each image. With a
    negative weight it takes from a caption what it would earn beside any image (after Wang et al. 2020, "Compare and
    Reweight", whose other images are similar ones).

    Args:
        weights: Weight of each metric, out of `KEYS` and cider_between.
        corpus: Reference captions of each training image.
    Raises:
        UserError: A metric is unknown, or there is no other image.
    """

    def __init__(self, weights: Mapping[str, float], corpus: Iterable[Sequence[str]]) -> None:
        if unknown := weights.keys() - {*KEYS, BETWEEN}:
            raise UserError(f"task.reward: {sorted(unknown)[0]}: unknown; use {', '.join([*KEYS, BETWEEN])}")
        self.weights, self.corpus = weights, [list(texts) for texts in corpus]
        if BETWEEN in weights and len(self.corpus) < 2:
            raise UserError(f"task.reward: {BETWEEN}: needs a second training image")
        self.units = units_of(chain.from_iterable(self.corpus))
        self.frequencies = DocumentFrequencies.of([[self.units.cut(text) for text in texts] for texts in self.corpus])

    def __call__(
        self, captions: Sequence[Sequence[str]], references: Sequence[Sequence[str]], *, seed: int, ids: Sequence[str]
    ) -> Floats:
        """Rewards of K captions of each of B images: (B, K).

        Args:
            references: Of each image.
            seed, ids: The keys by which the other image is drawn; ids are names of the B images.
        """
        weights = np.array([self.weights.get(name, 0.0) for name in KEYS])
        if set(self.weights) <= {"cider", BETWEEN}:
            rewards = self.weights.get("cider", 0.0) * self._scored(captions, references, References.cider)
        else:
            rewards = self._scored(captions, references, lambda known, column: known.score(column).values @ weights)
        if weight := self.weights.get(BETWEEN):
            others = [self.other(known, seed, id) for known, id in zip(references, ids, strict=True)]
            rewards += weight * self._scored(captions, others, References.cider)
        return rewards

    def other(self, references: Sequence[str], *keys: int | str) -> list[str]:
        """The captions of a training image drawn for these keys, which is not the one with these references."""
        place = key("between", *keys) % len(self.corpus)
        return self.corpus[place] if self.corpus[place] != list(references) else self.corpus[place - 1]

    def _scored(
        self,
        captions: Sequence[Sequence[str]],
        references: Sequence[Sequence[str]],
        score: Callable[[References, Mapping[str, str]], Floats],
    ) -> Floats:
        """The score of each caption: (B, K)."""
        texts = map(self.units.cut, chain(chain.from_iterable(captions), chain.from_iterable(references)))
        names = [f"{place:09}" for place in range(len(references))]  # which are sorted
        prepared = References(dict(zip(names, references, strict=True)), self.frequencies.among(texts), self.units)
        columns = [dict(zip(names, column, strict=True)) for column in zip(*captions, strict=True)]
        return np.stack([score(prepared, column) for column in columns], 1)


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
