"""Losses of pairs of answers: DPO, IPO and SimPO, as functions of the log-probabilities of both answers."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor


class PairScores(NamedTuple):
    """The answers of some pairs, the chosen one in column 0 and the rejected one in column 1.

    Args:
        logprobs: Their log-probabilities in nats, summed over tokens.
        counts: Their numbers of tokens, end tokens included.
        reference: Their log-probabilities by the reference model; None if there is none.
    Shapes:
        all (N, 2)
    """

    logprobs: Tensor
    counts: Tensor
    reference: Tensor | None = None

    @property
    def log_ratios(self) -> Tensor:
        """Log-probabilities minus those of the reference: (N, 2)."""
        assert self.reference is not None
        return self.logprobs - self.reference


class Objective(Protocol):
    """A loss of pairs of answers."""

    uses_reference: bool

    def rewards(self, scores: PairScores) -> Tensor:
        """The implicit rewards of the answers: (N, 2)."""

    def losses(self, scores: PairScores) -> Tensor:
        """The loss of each pair: (N,)."""


def margins(rewards: Tensor) -> Tensor:
    """Rewards of chosen answers minus those of rejected ones: (N, 2) -> (N,)."""
    return rewards[:, 0] - rewards[:, 1]


def _logistic_losses(values: Tensor, label_smoothing: float) -> Tensor:
    """Negative log-probability that the chosen answer is better, or with the probability of smoothing the other."""
    return -(1 - label_smoothing) * F.logsigmoid(values) - label_smoothing * F.logsigmoid(-values)


@dataclass(frozen=True)
class DPO:
    """Direct preference optimization (Rafailov et al. 2023, equation 7).

    Args:
        beta: Factor of log-ratios; a higher one keeps the model closer to the reference.
        label_smoothing: Probability that the labels of a pair are wrong (conservative DPO, Mitchell 2023).
    """

    beta: float
    label_smoothing: float = 0.0
    uses_reference = True

    def rewards(self, scores: PairScores) -> Tensor:
        return self.beta * scores.log_ratios

    def losses(self, scores: PairScores) -> Tensor:
        return _logistic_losses(margins(self.rewards(scores)), self.label_smoothing)


@dataclass(frozen=True)
class IPO:
    """Identity preference optimization (Azar et al. 2024, equation 17), with log-ratios per token as in TRL.

    Args:
        beta: The paper's tau: the difference of both log-ratios per token approaches 1 / (2 beta).
    """

    beta: float
    uses_reference = True

    def rewards(self, scores: PairScores) -> Tensor:
        return self.beta * scores.log_ratios

    def losses(self, scores: PairScores) -> Tensor:
        return (margins(scores.log_ratios / scores.counts.clamp(min=1)) - 1 / (2 * self.beta)).square()


@dataclass(frozen=True)
class SimPO:
    """Simple preference optimization (Meng et al. 2024, equation 6): log-probabilities per token, without a reference.

    Args:
        beta: Factor of log-probabilities per token.
        gamma: Margin that the reward of the chosen answer is to exceed that of the rejected one by.
        label_smoothing: As in DPO.
    """

    beta: float
    gamma: float
    label_smoothing: float = 0.0
    uses_reference = False

    def rewards(self, scores: PairScores) -> Tensor:
        return self.beta * scores.logprobs / scores.counts.clamp(min=1)

    def losses(self, scores: PairScores) -> Tensor:
        return _logistic_losses(margins(self.rewards(scores)) - self.gamma, self.label_smoothing)
