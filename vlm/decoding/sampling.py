"""From logits to the distribution that a token is drawn from."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vlm.errors import UserError
from vlm.nn.precision import widest


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution of a drawn token; filters apply one after another, each to the tokens that the one before left.

    Args:
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Keeps the k most probable tokens (Fan et al. 2018).
        top_p: Keeps the most probable tokens that together have at least this probability (Holtzman et al. 2020).
        min_p: Keeps tokens of at least this probability relative to the most probable one (Nguyen et al. 2024).
    Raises:
        UserError: A value is outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"--temperature {self.temperature:g} is not possible; give 0 (the most probable) or more")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"--top-k {self.top_k} is not possible; give at least 1")
        for name, value in (("--top-p", self.top_p), ("--min-p", self.min_p)):
            if value is not None and not 0 < value <= 1:
                raise UserError(f"{name} {value:g} is not possible; give a number above 0 and at most 1")

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution to draw from: logits (B, V) -> (B, V), rows that sum to 1."""
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
        # Shifted first: a small temperature would send large logits to infinity, and their difference to NaN.
        probs = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_k is not None and self.top_k < probs.shape[-1]:
            probs = _keep(probs, probs >= probs.topk(self.top_k).values[:, -1:])
        if self.top_p is not None:
            ordered, places = probs.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # of the more probable ones; 0 for the first, which always stays
            probs = _keep(probs, (before < self.top_p).gather(-1, places.argsort(-1)))
        if self.min_p is not None:
            probs = _keep(probs, probs >= self.min_p * probs.amax(-1, keepdim=True))
        return probs

    def draw(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Draws a token a row by inverting the cumulative distribution.

        Shapes:
            logits (B, V), uniform (B,) in [0, 1) -> tokens (B,)
        """
        cumulative = self.probabilities(logits.to(widest(logits.device))).cumsum(-1)
        # Scaled by the total, which rounding keeps from being 1, so that no draw falls behind the last token.
        return torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]


def _keep(probs: Tensor, kept: Tensor) -> Tensor:
    probs = probs * kept
    return probs / probs.sum(-1, keepdim=True)
