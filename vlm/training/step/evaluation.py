"""The state of a validation or test: what it has read so far, then its results."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vlm.errors import UserError, printable
from vlm.nn.precision import widest
from vlm.training.step.losses import Term


class EvaluationState:
    """One evaluation of a split.

    Attributes:
        samples: Some inputs with the model's outputs, for people to look at: each has at least "line", the line to
            print.
        unreadable: A reason for each sample that could not be read.
        used: Number of samples that were read; of all ranks, once the losses are known.
        results: The scores as split/metric. Until this evaluation has some, those of the one before.
    Args:
        split: Name of the split.
        ranks: Number of processes that share it.
        device: Where losses are summed.
        results: The scores of the evaluation before.
    """

    def __init__(
        self,
        split: str,
        *,
        ranks: int = 1,
        device: torch.device | None = None,
        results: dict[str, float] | None = None,
    ) -> None:
        self.split, self.ranks, self.device = split, ranks, device or torch.device("cpu")
        self.results = results or {}
        self.samples: list[dict[str, Any]] = []
        self.unreadable: list[str] = []
        self.used = 0
        self._terms: dict[str, tuple[float, torch.Tensor]] = {}

    def read(self, batch: Any) -> None:
        """Counts the samples of a batch, and records the unreadable ones."""
        self.used += len(batch.ids)
        self.unreadable += [sample.reason for sample in batch.bad]

    def add_loss(self, terms: Mapping[str, Term]) -> None:
        """Adds the terms of a batch's loss."""
        for name, term in terms.items():
            if name not in self._terms:
                self._terms[name] = term.weight, torch.zeros(2, dtype=widest(self.device), device=self.device)
            sums = self._terms[name][1]
            sums[0] += term.total
            sums[1] += term.count

    def has_samples(self, limit: int | None) -> bool:
        """Returns True if the ranks together have `limit` samples; False for None."""
        return limit is not None and len(self.samples) >= -(-limit // self.ranks)

    def losses(self) -> dict[str, float]:
        """The loss over all ranks as "loss", and its terms as "loss_NAME" if there are several.

        Raises:
            UserError: No sample could be read.
        """
        own = self.used, {name: (weight, *sums.tolist()) for name, (weight, sums) in self._terms.items()}
        everyone: list[Any] = [own]
        if self.ranks > 1:  # a rank without a batch has no terms
            everyone = [None] * self.ranks
            torch.distributed.all_gather_object(everyone, own)
        self.used, terms = sum(used for used, _ in everyone), [terms for _, terms in everyone]
        weights = {name: term[0] for rank in terms for name, term in rank.items()}
        if self.unreadable and not any(term[2] for rank in terms for term in rank.values()):
            raise UserError(f"the evaluation: no sample can be read: {printable(self.unreadable[0])}", status=1)
        means = {name: _mean([rank[name][1:] for rank in terms if name in rank]) for name in weights}
        loss = sum(weight * means[name] for name, weight in weights.items()) if weights else math.nan
        return {"loss": loss, **({f"loss_{name}": mean for name, mean in means.items()} if len(means) > 1 else {})}


def _mean(sums: Sequence[tuple[float, float]]) -> float:
    total, count = (sum(values) for values in zip(*sums, strict=True))
    return total / count if count else math.nan
