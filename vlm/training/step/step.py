"""One optimiser step, from its first batch to its update.

A step over several batches and ranks equals that of one large batch. Each batch adds the sum of its loss, not the mean,
and the gradients are divided once by the count over all batches and ranks, after unscaling and before clipping.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vlm.data.batch import Batch
from vlm.training.step.fsdp import to_local
from vlm.training.step.losses import FiniteCheck, HostCopy, Term, runs_ahead, stop_run

SMALLEST_SCALE = 1e-4  # of a 16-bit loss; gradients that overflow at this scale do so at any


class StepState:
    """The optimiser step under way, and the check of the last one.

    Lightning calls `add` for each batch, before its backward pass, then `average` and `check_and_clip` once a step.
    Nothing here waits for a device, except that a CPU's check is read before the update.

    Attributes:
        loss: Loss of the last step whose check was read.
        received: A signal that this process received; 0 for none.
        agreed: The signal that some rank had received by the last step whose check was read; 0 for none.
        bad_samples: Training samples that any of several ranks could not read; reset by the callback that counts them.
    Args:
        trainer: The trainer of the run.
        model: The model, whose parameters a message may name.
    """

    def __init__(self, trainer: L.Trainer, model: nn.Module) -> None:
        self.trainer, self.model = trainer, model
        self.loss: float | None = None
        self.received = self.agreed = self.bad_samples = 0
        self.check: FiniteCheck | None = None
        self._begin()

    def _begin(self) -> None:
        self.batches: list[tuple[Sequence[str], Mapping[str, Term]]] = []  # the names of samples, the terms of the loss
        # Counts of the loss terms over all of this rank's batches of the step; empty for a loss of one term.
        self.counts: Mapping[str, int] = {}
        self._scales: list[Tensor] | None = None
        self._bad = 0

    def add(self, batch: Batch, terms: Mapping[str, Term]) -> Tensor:
        """Adds a batch; returns the loss to run its backward pass from."""
        detached = {name: replace(term, total=term.total.detach()) for name, term in terms.items()}
        self.batches.append((batch.ids, detached))
        self._bad += len(batch.bad)
        # Lightning will divide by the accumulated batches, and DDP by the ranks.
        return self._weighted_sum(terms) * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def _weighted_sum(self, terms: Mapping[str, Term]) -> Tensor:
        """Returns the weighted sum of a batch's terms, scaled to the first term, whose count divides all gradients."""
        if len(terms) == 1:
            (term,) = terms.values()
            return term.total if term.weight == 1 else term.total * term.weight
        if terms.keys() != self.counts.keys():
            given = ", ".join(self.counts) or "none"
            raise TypeError(f"the task's counts(batch) returns {given}, but its loss has {', '.join(terms)}")
        if self._scales is None:
            local_counts = [on_device(self.counts[name], term.total) for name, term in terms.items()]
            total_counts = sum_over_ranks(torch.stack(local_counts), self.trainer).clamp(min=1)
            self._scales = list(total_counts[0] / total_counts)
        parts = zip(terms.values(), self._scales, strict=True)
        return torch.stack([term.total * (scale * term.weight) for term, scale in parts]).sum()

    def average(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns the loss, and its terms if there are several; keeps the count that divides the gradients."""
        # The kernel of a fused optimiser would unscale a 16-bit loss's gradients only after they are clipped.
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)
        first = self.batches[0][1]
        sums = torch.stack([_sums([terms[name] for _, terms in self.batches]) for name in first])  # (N, 2)
        totals, counts = self._reduce_over_ranks(sums).unbind(1)
        counts = counts.clamp(min=1)
        self._divisor = counts[0]
        means = dict(zip(first, totals / counts, strict=True))
        self._loss = torch.stack([term.weight * means[name] for name, term in first.items()]).sum()
        terms = {f"loss_{name}": mean for name, mean in means.items()} if len(means) > 1 else {}
        return {"loss": self._loss, **terms}

    def _reduce_over_ranks(self, sums: Tensor) -> Tensor:
        """Returns the sums over all ranks. The same message carries their signals and counts of unreadable samples."""
        ranks = self.trainer.world_size
        if ranks == 1:
            self._shared = sums.new_empty(0)
            return sums
        more = sums.new_zeros(ranks + 1)
        more[self.trainer.global_rank].fill_(self.received)
        more[-1].fill_(self._bad)
        message = sum_over_ranks(torch.cat([sums.flatten(), more]), self.trainer)
        self._shared = message[sums.numel() :]
        return message[: sums.numel()].view_as(sums)

    def check_and_clip(self, optimizer: Optimizer, limit: float | None, *, by_value: bool) -> None:
        """Begins the check that loss and gradients are finite, then averages and clips the gradients.

        On a CPU the host reads the check before the update. On a GPU a fused optimiser reads it and skips an update
        that is not finite; the host reads it after it has launched the next step's backward pass, without waiting:

            step             4        5        6
            host launches    4        5        6
            host reads                4        5: not finite, the run stops; step 6 changed nothing that is saved

        No step is saved before its check is read. All ranks have the same loss and norms, so that all stop together.

        Args:
            limit: Largest norm of all gradients, or value of each; None or 0 for no limit.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms = torch.stack(list(torch._foreach_norm([p.grad for p in parameters])))  # (P,), the same on all ranks
        norms = (norms.full_tensor() if isinstance(norms, DTensor) else norms) / self._divisor
        self.read_check()
        bad = torch.isfinite(self._loss + torch.linalg.vector_norm(norms)).logical_not().to(norms.dtype)
        numbers = HostCopy(torch.cat([bad[None], self._loss[None].to(bad.dtype), self._shared.to(bad.dtype)]))
        self.check = FiniteCheck(self.trainer.global_step + 1, self.batches, parameters, norms, numbers)
        first = optimizer.param_groups[0]["params"][0]
        fused = all(group.get("fused") for group in optimizer.param_groups)
        if fused and runs_ahead(first.device) and not isinstance(first, DTensor):  # then it skips a bad update itself
            optimizer.found_inf = bad  # type: ignore[attr-defined]
        else:
            self.read_check()
        self._begin()
        divisor = self._divisor
        if limit and not by_value:  # Pascanu et al. 2013
            divisor = divisor * ((torch.linalg.vector_norm(norms) + 1e-6) / limit).clamp(min=1)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        updates_on_cpu = first.device.type == "cpu" and not isinstance(first, DTensor)
        if fused and updates_on_cpu and scaler is None and not (limit and by_value):
            optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]  # the update divides in its one pass
            return
        grads = gradients(optimizer)
        torch._foreach_div_(grads, divisor.to(grads[0].dtype))
        if limit and by_value:
            torch._foreach_clamp_min_(grads, -limit)
            torch._foreach_clamp_max_(grads, limit)

    def read_check(self) -> None:
        """Reads the check of the last step, and what ranks shared in it, unless it was read before.

        Raises:
            NotFiniteError: Loss or gradients are not finite, and no loss scaler handles it.
        """
        if self.check is None:
            return
        check, self.check = self.check, None
        bad, self.loss, *shared = check.numbers.read()
        if bad:
            handled = is_overflow_handled(self.trainer)
            stop_run(self.trainer, self.model, check, self.loss, is_overflow_handled=handled)
        *signals, unreadable = shared or (0.0, 0.0)
        self.agreed, self.bad_samples = int(max(signals)), self.bad_samples + int(unreadable)


def is_mid_step(trainer: L.Trainer) -> bool:
    """Returns True if the last batch did not complete an optimiser step."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return done % trainer.accumulate_grad_batches != 0 and done < trainer.num_training_batches


def is_logged(step: int, trainer: L.Trainer) -> bool:
    """Returns True for an optimiser step, counted from 1, whose metrics go to the loggers."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and (step % every == 0 or trainer.should_stop)


def sum_over_ranks(tensor: Tensor, trainer: L.Trainer) -> Tensor:
    """The sum of all ranks' tensors."""
    if trainer.world_size > 1:
        tensor = tensor.clone()
        torch.distributed.all_reduce(tensor)  # the strategy's method would wait at a barrier first
    return tensor


def on_device(number: Tensor | int, like: Tensor) -> Tensor:
    """A number as a tensor on a device; filled there, because a copy from the host would wait."""
    return number.to(like.dtype) if isinstance(number, Tensor) else like.new_full((), number)


def _sums(terms: Sequence[Term]) -> Tensor:
    """Sum and count of a term over batches: (2,)."""
    totals = sum((term.total for term in terms[1:]), terms[0].total)
    counts = sum((term.count for term in terms[1:]), terms[0].count)
    return torch.stack([totals, on_device(counts, totals)])


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients that an optimiser is about to use; if they are sharded, this rank's part."""
    return [to_local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def is_overflow_handled(trainer: L.Trainer) -> bool:
    """Returns True if a loss scaler handles non-finite gradients: it skips the step and lowers the scale."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler is not None and scaler.get_scale() > SMALLEST_SCALE
