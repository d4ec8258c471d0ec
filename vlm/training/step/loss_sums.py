"""Sums of the terms of a loss: over the batches of an optimiser step, and over those of a split."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vlm.errors import UserError, printable
from vlm.nn.precision import widest
from vlm.training.step.losses import Term


def on_device(number: Tensor | int, like: Tensor) -> Tensor:
    """A number as a tensor of another's type, on its device; filled there, since a copy from the host would wait."""
    return number.to(like.dtype) if isinstance(number, Tensor) else like.new_full((), number)


class Step:
    """The batches of this rank that an optimiser step has read so far.

    Their sums stay on the device: nothing here waits for it.
    """

    def __init__(self) -> None:
        self.batches: list[tuple[Sequence[str], Mapping[str, Term]]] = []
        self._scales: list[Tensor] | None = None

    def add(self, ids: Sequence[str], terms: Mapping[str, Term]) -> None:
        """Adds a batch: the names of its samples, and the terms of its loss."""
        self.batches.append((ids, {name: replace(term, total=term.total.detach()) for name, term in terms.items()}))

    def weighted(
        self, terms: Mapping[str, Term], counts: Mapping[str, int], summed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The weighted sum of a batch's terms, on the scale of the first one: its count is to divide all gradients.

        Args:
            counts: Of the terms in this rank's batches of the step; of no use to a single term.
            summed: Adds a tensor over the ranks.
        """
        if len(terms) == 1:
            (term,) = terms.values()
            return term.total if term.weight == 1 else term.total * term.weight
        if terms.keys() != counts.keys():
            raise TypeError(f"counts(batch) of the task gives {', '.join(counts) or 'none'}, loss {', '.join(terms)}")
        if self._scales is None:
            own = [on_device(counts[name], term.total) for name, term in terms.items()]
            whole = summed(torch.stack(own)).clamp(min=1)
            self._scales = list(whole[0] / whole)
        parts = zip(terms.values(), self._scales, strict=True)
        return torch.stack([term.total * (scale * term.weight) for term, scale in parts]).sum()

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each term."""
        return {name: term.weight for name, term in self.batches[0][1].items()}

    def sums(self) -> Tensor:
        """Sum and count of each of the N terms over all batches: (N, 2)."""
        return torch.stack([_sums([terms[name] for _, terms in self.batches]) for name in self.weights])

    def suspects(self) -> tuple[bool, list[str]]:
        """True where a batch's loss is not finite, and the samples of each such batch; of all batches if none is."""
        bad = [ids for ids, terms in self.batches if not all(bool(term.total.isfinite()) for term in terms.values())]
        return bool(bad), [str(id) for ids in bad or [ids for ids, _ in self.batches] for id in ids]


def _sums(terms: Sequence[Term]) -> Tensor:
    totals = sum((term.total for term in terms[1:]), terms[0].total)
    counts = sum((term.count for term in terms[1:]), terms[0].count)
    return torch.stack([totals, on_device(counts, totals)])


class SplitLoss:
    """The loss of a whole split.

    Args:
        device: Where its sums lie until they are asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._terms: dict[str, tuple[float, Tensor]] = {}

    def add(self, terms: Mapping[str, Term]) -> None:
        """Adds the terms of a batch's loss."""
        for name, term in terms.items():
            if name not in self._terms:
                self._terms[name] = term.weight, torch.zeros(2, dtype=widest(self.device), device=self.device)
            sums = self._terms[name][1]
            sums[0] += term.total
            sums[1] += term.count

    def means(self, ranks: int, *, unread: Sequence[str] = ()) -> dict[str, float]:
        """The loss over all ranks as "loss", and its terms as "loss_NAME" where there are several.

        Args:
            unread: A reason for each sample that could not be read.
        Raises:
            UserError: No other was.
        """
        own = {name: (weight, *sums.tolist()) for name, (weight, sums) in self._terms.items()}
        everyone: list[Any] = [own]
        if ranks > 1:  # a rank without a batch knows of no term
            everyone = [None] * ranks
            torch.distributed.all_gather_object(everyone, own)
        weights = {name: term[0] for rank in everyone for name, term in rank.items()}
        if unread and not any(term[2] for rank in everyone for term in rank.values()):
            raise UserError(f"the evaluation: no sample can be read: {printable(unread[0])}", status=1)
        means = {name: _mean([rank[name][1:] for rank in everyone if name in rank]) for name in weights}
        loss = sum(weight * means[name] for name, weight in weights.items()) if weights else math.nan
        return {"loss": loss, **({f"loss_{name}": mean for name, mean in means.items()} if len(means) > 1 else {})}


def _mean(sums: Sequence[tuple[float, float]]) -> float:
    total, count = (sum(values) for values in zip(*sums, strict=True))
    return total / count if count else math.nan
