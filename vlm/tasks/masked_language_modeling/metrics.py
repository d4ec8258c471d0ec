"""Metrics of masked words: accuracy, loss and pseudo-perplexity, and the best scores that a grammar allows."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vlm.evaluation.metrics.bootstrap import Scorer, intervals, ratio_scorer
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import SampleMetric

Chances = Callable[[Sequence[str | None]], Sequence[Mapping[str, float]] | None]


class Filled(NamedTuple):
    """A text of an evaluation.

    Args:
        text: The text.
        gaps: Indices of the masked words.
        true, predicted: The original tokens of the gaps, and the likeliest ones.
        likelihood: Sum of the log-probabilities of its tokens, each masked alone; None if that was not asked for.
        tokens: Number of these tokens.
    """

    text: str
    gaps: Sequence[int]
    true: Sequence[str]
    predicted: Sequence[str]
    likelihood: float | None
    tokens: int


class MaskedMetric(SampleMetric[Filled]):
    """Scores over all texts of all processes."""

    kind, unit = Filled, "word"
    _constant: str  # the most frequent token of the gaps, once `constant` has counted them

    def compute(self) -> dict[str, float]:
        """Returns accuracy of the tokens in gaps, and pseudo_perplexity per token of the texts with a likelihood.

        Raises:
            UserError: Nothing was added.
        """
        texts = self.gather()
        right, count = self._counts().sum(0)
        scores = {"accuracy": float(right / count)}
        scored = [(text.likelihood, text.tokens) for text in texts if text.likelihood is not None]
        if scored:
            scores["pseudo_perplexity"] = math.exp(-sum(value for value, _ in scored) / sum(n for _, n in scored))
        return scores

    def constant(self) -> dict[str, float]:
        """Returns accuracy@constant, of the most frequent token of the gaps if it were predicted for each."""
        tokens = Counter(token for text in self.samples.values() for token in text.true)
        self._constant, count = max(tokens.items(), key=lambda item: item[1])
        return {"accuracy@constant": count / tokens.total()}

    def scorers(self) -> tuple[Scorer, Scorer, int]:
        """Returns scorers of the accuracy of the model and of `constant`, and the number of texts."""
        hits = [[text.true.count(self._constant), len(text.true)] for text in self.samples.values()]
        model = self._counts()
        return ratio_scorer(model), ratio_scorer(np.array(hits, np.float64)), len(model)

    def ceiling(self, chances: Chances) -> dict[str, float]:
        """Returns the scores of a reader who knows the grammar that generated the texts, a limit for models.

        Args:
            chances: Returns the probability of each word in each gap; None if the grammar is unknown.
        Returns:
            accuracy@ceiling, the expected accuracy of words; loss@ceiling, the loss per word.
        """
        best, losses = [], []
        for text in self.samples.values():
            words = text.text.split()
            of_gaps = chances([None if at in text.gaps else word for at, word in enumerate(words)])
            if of_gaps is None:
                return {}
            best += [max(chance.values(), default=0.0) for chance in of_gaps]
            losses += [-math.log(chance.get(words[at], 1e-9)) for at, chance in zip(text.gaps, of_gaps, strict=True)]
        return {"accuracy@ceiling": sum(best) / len(best), "loss@ceiling": sum(losses) / len(losses)}

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns accuracy@low and accuracy@high: a 95% interval by bootstrap over texts."""
        counts = self._counts()
        return intervals(["accuracy"], ratio_scorer(counts), len(counts), seed=seed)

    def _counts(self) -> Floats:
        """Returns the numbers of right tokens and of gaps of each text. Shapes: -> (N, 2)"""
        pairs = (zip(text.true, text.predicted, strict=True) for text in self.samples.values())
        hits = [[one == other for one, other in pair] for pair in pairs]
        return np.array([[sum(hit), len(hit)] for hit in hits], np.float64)
