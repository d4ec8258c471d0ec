"""The one LightningModule base: optimiser steps that are exact under accumulation, ranks and resume."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from vlm.config.names import FORMAT
from vlm.data.fields import Field
from vlm.data.records import Split
from vlm.errors import Share
from vlm.evaluation.report.sections import Finding, Section
from vlm.models.flop import Work
from vlm.randomness import key, seed_torch
from vlm.training.data_module import Data
from vlm.training.step import adapters, finite
from vlm.training.step import step as steps
from vlm.training.step.fsdp import gather, load, scatter, shard
from vlm.training.step.loop_counters import settle, total_steps, validates_regularly
from vlm.training.step.loss_sums import SplitLoss, Step
from vlm.training.step.losses import Term
from vlm.training.step.optim import Optimization


class TaskOptions(TypedDict):
    """Arguments of every task, which those with more pass on as they are; `Task` describes them."""

    fields: Mapping[str, Any]
    seed: int
    optimization: NotRequired[Optimization | None]
    freeze: NotRequired[Sequence[str]]
    label_smoothing: NotRequired[Share]


class Task(L.LightningModule):
    """A model with its loss and metrics.

    The loss of an optimiser step is a sum over tokens divided by their count over all ranks and accumulated batches:
    a batch returns its sum, and the gradients are divided once, after unscaling and before clipping. A loss of several
    terms is the weighted sum of such means; the counts of a step are then known before its first backward pass.

    Attributes:
        samples: Some inputs of the last evaluation with the model's outputs, for people to look at: each has at least
            "line", the line to print.
        used: Samples of the last test.
        unread: A reason for each sample of the last evaluation that could not be read.
        validation_due: Validation comes first where a run goes on from the checkpoint being saved; set by the callback
            that saves.
        counted: Count of the first loss term since it was last set back: tokens, or images of a classifier.
        step_counts: Counts of the loss terms in this rank's batches of an optimiser step; set by the training loader.
        step_loss: Loss of the last optimiser step, on the device.
        received: Number of the signal that this process received, 0 for none; set by the callback that stops the run.
        agreed: Number of a signal that any of several ranks had received in the last optimiser step that was read.
        left_out: Names of the model's weights that checkpoints leave to the base of its adapters.
        bad_samples: Training samples that any of several ranks could not read, set back by the callback that counts.
    Args:
        model: The model to train.
        fields: Fields that are read of each record, by the names that batches have.
        optimization: Optimiser and schedule; None for a model that is only evaluated.
        seed: Key of dropout and of all other randomness of a step.
        freeze: Names of submodules of the model that are not trained, such as "encoder".
        label_smoothing: Share of the target spread evenly over the vocabulary or the classes.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        fields: Mapping[str, Field],
        seed: int,
        optimization: Optimization | None = None,
        freeze: Sequence[str] = (),
        label_smoothing: Share = 0.0,
    ) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing
        self.model, self.fields = model, fields
        self.optimization, self.seed, self.freeze_names = optimization, seed, freeze
        for name in freeze:
            model.get_submodule(name).requires_grad_(False).eval()  # the trainer leaves modes as they are
        self._step = Step()
        self.results: dict[str, float] = {}
        self.samples: list[dict[str, Any]] = []
        self.unread: list[str] = []
        self.used, self.validation_due = 0, False
        self.counted: Tensor | int = 0
        self.step_counts: Mapping[str, int] = {}
        self.step_loss: Tensor | None = None
        self.received = self.agreed = self.bad_samples = self._bad = 0
        self._shared = torch.empty(0)
        self._check: finite.StepCheck | None = None
        self.test_split = "test"
        self.about: dict[str, Any] = {}
        self.left_out: Collection[str] = ()

    name = ""  # of a task of vlm, as checkpoints and configs have it; others stand there as package.module.Class
    headlines: Sequence[str] = ()  # the few metrics that say most, for the report
    smaller_is_better: Sequence[str] = ("loss",)  # of the metrics that rank the runs of a sweep
    curves: Sequence[str] = ()  # metrics of validations that the report draws over steps
    unit = "images"  # what `size` counts
    remark = ""  # on how the scores of the last evaluation, of training too, are to be read
    counted_unit = "tokens"  # what the first loss term counts, where rows of text are read

    def loss(self, batch: Any) -> dict[str, Term]:
        """The terms of a batch's loss, the same ones for each batch."""
        raise TypeError(f"{type(self).__name__} defines no loss")

    def counts(self, batch: Any) -> dict[str, int] | None:
        """The counts of a batch's loss terms, read on the host before it is sent to the device.

        None for a loss of one term, whose count may be known as late as its sum.
        """
        return None

    @classmethod
    def compares_samples(cls, options: Mapping[str, Any]) -> bool:
        """True where a loss term compares the samples of a batch with one another, as a contrastive one does.

        Args:
            options: The task's config.
        """
        return False

    def size(self, batch: Any) -> int:
        """Size of a batch in `unit`, for the progress bar."""
        return len(batch.ids)

    def work(self, batch: Any) -> Work:
        """Sizes of a batch, for counts of operations. Asked in every step, it may not wait for the device."""
        return Work(images=len(batch.ids))

    def configure_model(self) -> None:
        shard(self.model, self.trainer.strategy)

    def load_weights(self, state: Mapping[str, Tensor]) -> None:
        """Loads the model's weights, whole ones, however it is laid out over the ranks."""
        load(self.model, state)

    def train(self, mode: bool = True) -> "Task":
        super().train(mode)
        for name in self.freeze_names:  # a frozen part draws no dropout and keeps its statistics
            self.model.get_submodule(name).eval()
        return self

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch if device.type == "cpu" else batch.to(device, non_blocking=True)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        seed_torch(key(self.seed, "step", self.current_epoch, batch_idx, self.global_rank), self.device)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        terms = self.loss(batch)
        self._step.add(batch.ids, terms)
        self._bad += len(batch.bad)
        self.counted = self.counted + next(iter(terms.values())).count
        # Lightning will divide by the accumulated batches, and DDP by the ranks.
        total = self._step.weighted(terms, self.step_counts, self._summed)
        return total * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        steps.unscale(optimizer, self.trainer)
        totals, counts = self._shared_sums().unbind(1)
        counts = counts.clamp(min=1)
        gradients = steps.gradients(optimizer)
        torch._foreach_div_(gradients, counts[0].to(gradients[0].dtype))
        weights = self._step.weights
        means = dict(zip(weights, totals / counts, strict=True))
        self.step_loss = torch.stack([weight * means[name] for name, weight in weights.items()]).sum()
        if self.trainer._logger_connector.should_update_logs:  # a log of each step would cost 2% of it
            self.log("train/loss", self.step_loss)
            if len(means) > 1:
                self.log_dict({f"train/loss_{name}": mean for name, mean in means.items()})

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the gradients, and sees to it that no update is taken that is not finite."""
        assert self.step_loss is not None
        norms = steps.gradient_norms(optimizer)
        self.settle()
        self._check = finite.check(self.trainer, optimizer, self._step, self.step_loss, norms, self._shared)
        if not finite.can_skip(optimizer):
            self.settle()
        self._step = Step()
        if gradient_clip_val:
            by_value = gradient_clip_algorithm == "value"
            steps.clip(optimizer, gradient_clip_val, None if by_value else torch.linalg.vector_norm(norms))

    def settle(self) -> None:
        """Reads the check of the last optimiser step, unless it is read already.

        Raises:
            NotFiniteError: The step was not finite; the run stops.
        """
        if self._check is not None:
            checked, self._check = self._check, None
            *signals, bad = checked.settle(self.trainer, self.model) or (0.0, 0.0)
            self.agreed, self.bad_samples = int(max(signals)), self.bad_samples + int(bad)

    def on_train_start(self) -> None:
        self._step = Step()

    def _shared_sums(self) -> Tensor:
        """Sum and count of each term over all ranks: (N, 2).

        In the same message the ranks tell each other of signals, and of samples that they could not read.
        """
        sums = self._step.sums()
        if self.trainer.world_size == 1:
            self._shared = sums.new_empty(0)
            return sums
        more = sums.new_zeros(self.trainer.world_size + 1)
        more[self.trainer.global_rank].fill_(self.received)
        more[-1].fill_(self._bad)
        self._bad = 0
        message = self._summed(torch.cat([sums.flatten(), more]))
        self._shared = message[sums.numel() :]
        return message[: sums.numel()].view_as(sums)

    def _summed(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        if self.trainer.world_size > 1:
            tensor = tensor.clone()
            torch.distributed.all_reduce(tensor)  # the strategy's own would wait at a barrier first
        return tensor

    # Validation and test are one evaluation: a loss over the whole split, and the task's metrics.

    def on_evaluation_start(self) -> None:
        """Clears the samples and sums of an earlier evaluation."""
        gather(self.model)
        self.samples = []
        self.unread = []
        self.used = 0
        self._split_loss = SplitLoss(self.device)

    @property
    def evaluated_split(self) -> Split:
        """The split of the evaluation that runs."""
        data: Data = self.trainer.datamodule  # type: ignore[attr-defined]
        return data.split(self.test_split if self.trainer.testing else "val")

    def add_loss(self, terms: Mapping[str, Term]) -> None:
        """Adds the terms of a batch's loss to those of the split."""
        self._split_loss.add(terms)

    def has_samples(self, limit: int | None) -> bool:
        """True where the ranks together have so many `samples`; never for None."""
        return limit is not None and len(self.samples) >= -(-limit // self.trainer.world_size)

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        """Metrics beside the split's mean loss; with their controls if the evaluation is final."""
        raise TypeError(f"{type(self).__name__} measures nothing")

    def on_evaluation_end(self, split: str, *, final: bool) -> None:
        """Logs the results of an evaluation as split/metric."""
        losses = self._split_loss.means(self.trainer.world_size, unread=self.unread)
        results = self.evaluation_results(split, losses["loss"], final=final)
        self.results = {f"{split}/{name}": value for name, value in {**losses, **results}.items()}
        if not (final and split == "val"):  # which has been validated: its curves would end in a point of another kind
            self.log_dict(self.results, rank_zero_only=False)

    def evaluation_step(self, batch: Any, *, final: bool) -> None:
        """Adds the loss of a batch to that of the split, and what metrics need of it; a test is final."""
        raise TypeError(f"{type(self).__name__} evaluates nothing")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluation_step(batch, final=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluation_step(batch, final=True)

    def on_validation_epoch_start(self) -> None:
        self.on_evaluation_start()

    def on_validation_epoch_end(self) -> None:
        self.on_evaluation_end("val", final=False)

    def on_test_epoch_start(self) -> None:
        self.on_evaluation_start()

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.used += len(batch.ids)

    def on_test_epoch_end(self) -> None:
        self.on_evaluation_end(self.test_split, final=True)
        self.used = int(self._summed(torch.tensor(self.used, device=self.device)))

    def on_validation_end(self) -> None:
        scatter(self.model)  # after the callbacks, which may look at the model too

    on_test_end = on_validation_end

    def configure_optimizers(self) -> OptimizerLRScheduler:
        assert self.optimization is not None, "this task was built for evaluation only"
        optimizer = self.optimization.optimizer_for(self.model)
        factors = self.optimization.factors(optimizer, total_steps(self.trainer))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def description(self) -> dict[str, Any]:
        """Needs of the trained model's use beyond its weights, in plain containers, for the checkpoint."""
        kind = type(self)
        task = self.name or f"{kind.__module__}.{kind.__qualname__}"  # where `vlm predict --trust` finds its predictor
        states = (field.state() for field in self.fields.values())
        return {"task": task, **{name: value for state in states for name, value in state.items()}}

    def predictions(self) -> list[dict[str, Any]]:
        """Predictions of the last evaluation, a record a sample, in plain containers."""
        raise TypeError(f"{type(self).__name__} predicts nothing")

    def notes(self) -> list[str]:
        """Lines that stand below the scores of the last evaluation, such as how a metric is defined."""
        return []

    def findings(self) -> list[Finding]:
        """Faults of the model as a whole that the last evaluation shows, such as outputs that ignore their inputs."""
        return []

    def details(self) -> dict[str, Any]:
        """Figures of each class or image in the last evaluation, in plain containers."""
        return {}

    def report(self) -> list[Section]:
        """The task's own part of the last evaluation's report."""
        return []

    def reading(self, batch: Any, tokens: int) -> list[str]:
        """Lines that show what a training batch holds, with up to so many tokens of its first sample."""
        raise TypeError(f"{type(self).__name__} shows no batch")

    def example(self, data: Data, folder: Path) -> str:
        """A command that uses the trained model, less its checkpoint; files that it needs are put into the folder."""
        raise TypeError(f"{type(self).__name__} has no example")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["format"] = FORMAT
        adapters.leave_out(checkpoint, self.left_out)
        checkpoint["vlm"] = {**self.about, **self.description(), "scores": self.results}
        loops = checkpoint.get("loops", {}).get("fit_loop")
        if loops:
            self.settle()
            finite.refuse_non_finite(self.trainer, checkpoint)
            batches = int(self.trainer.num_training_batches)
            after = {"validates": validates_regularly(self.trainer), "validation_due": self.validation_due}
            settle(loops, epoch_batches=batches, step=self.global_step, **after)
