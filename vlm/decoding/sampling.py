"""Sampling of tokens from logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlm.errors import UserError
from vlm.nn.precision import widest

HOTTEST = 1e9  # a distribution is uniform long before; torch takes no integer of more than 64 bits


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling distribution of a token; filters apply in this order, each to the tokens left by the previous one.

    Args:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keeps the k most probable tokens (Fan et al. 2018); 0 or -1 keeps all.
        top_p: Keeps the most probable tokens with at least this total probability (Holtzman et al. 2020), at least one.
        min_p: Keeps tokens of at least this probability relative to the most probable one (Nguyen et al. 2024).
    Raises:
        UserError: A value is outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < HOTTEST:
            raise UserError(f"--temperature {self.temperature} is invalid; it must be 0 (greedy) to {HOTTEST:g}")
        if self.top_k is not None and self.top_k < -1:
            raise UserError(f"--top-k {self.top_k} is invalid; it must be at least 1, or 0 to keep all tokens")
        for name, value in (("--top-p", self.top_p), ("--min-p", self.min_p)):
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"{name} {value:g} is invalid; it must be from 0 to 1")

    def probabilities(self, logits: Tensor) -> Tensor:
        """The sampling distribution: logits (B, V) -> (B, V), rows sum to 1."""
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        # Shifted first: with a small temperature, large logits would become infinite and their difference NaN.
        probs = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_k is not None and 0 < self.top_k < probs.shape[-1]:
            probs = _keep(probs, probs >= probs.topk(self.top_k).values[:, -1:])
        if self.top_p is not None:
            ordered, places = probs.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # probability of the more probable ones; 0 for the first, always kept
            kept = (before < self.top_p) | (before == 0)
            probs = _keep(probs, kept.gather(-1, places.argsort(-1)))
        if self.min_p is not None:
            probs = _keep(probs, probs >= self.min_p * probs.amax(-1, keepdim=True))
        return probs

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draws one token per row by inverting the cumulative distribution.

        Shapes:
            logits (B, V), uniform (B,) in [0, 1) -> tokens (B,)
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        cumulative = self.probabilities(logits.to(widest(logits.device))).cumsum(-1)
        # Scaled by the total, which rounding may make less than 1, so that no draw exceeds the last token.
        return torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]


def _keep(probs: Tensor, kept: Tensor) -> Tensor:
    probs = probs * kept
    return probs / probs.sum(-1, keepdim=True)
