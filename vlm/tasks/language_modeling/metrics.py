"""Losses of a language model and of token frequencies by window, for intervals and paired differences."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vlm.data.batch import Targets
from vlm.evaluation.metrics.bootstrap import Scorer, intervals, ratio_scorer
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import SampleMetric


class WindowLosses(NamedTuple):
    """A window of an evaluation.

    Args:
        tokens: Number of scored tokens.
        model: Their loss in nats, summed.
        unigram: Their loss by the frequencies of tokens in train, summed; None if these are not counted.
    """

    tokens: int
    model: float
    unigram: float | None


class WindowMetric(SampleMetric[WindowLosses]):
    """Losses per token over all windows of all processes; other methods refer to the windows of the last `compute`."""

    kind, unit = WindowLosses, "text"

    def compute(self) -> dict[str, float]:
        """Returns the loss per token as "model" and, if it was counted, as "unigram".

        Raises:
            UserError: Nothing was added.
        """
        self.gather()
        return {name: float(np.divide(*self._sums(name).sum(0))) for name in ("model", "unigram") if self._has(name)}

    def scorers(self, scale: float) -> tuple[Scorer, Scorer, int] | None:
        """Returns scorers of the losses per token of model and unigram, and the number of windows.

        Args:
            scale: Factor of the losses.
        """
        if not self._has("unigram"):
            return None
        model, unigram = (ratio_scorer(self._sums(name) * [scale, 1]) for name in ("model", "unigram"))
        return model, unigram, len(self.samples)

    def intervals(self, name: str, scale: float, *, seed: int) -> dict[str, float]:
        """Returns name@low and name@high of the model's loss per token times `scale`: a 95% interval by bootstrap."""
        return intervals([name], ratio_scorer(self._sums("model") * [scale, 1]), len(self.samples), seed=seed)

    def _has(self, name: str) -> bool:
        return all(getattr(window, name) is not None for window in self.samples.values())

    def _sums(self, name: str) -> Floats:
        """Returns the loss and the number of tokens of each window. Shapes: -> (N, 2)"""
        return np.array([[getattr(window, name), window.tokens] for window in self.samples.values()], np.float64)


def unigram_losses(tokens: Tensor, targets: Targets, logprobs: Floats) -> list[float]:
    """Returns the loss of token frequencies in nats, summed over the scored positions of each row.

    Args:
        logprobs: Log-probability of each token.
    Shapes:
        tokens (B, L), logprobs (V,) -> (B,)
    """
    losses = torch.zeros(math.prod(tokens.shape), dtype=torch.float64)
    places = slice(None) if targets.places is None else targets.places.cpu()
    losses[places] = -torch.from_numpy(logprobs)[targets.labels.cpu()]
    return losses.view(tokens.shape).sum(1).tolist()
