"""The one LightningModule base: a model with its fields, its loss and its metrics."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from vlm.checkpoint.stored import FORMAT, Metadata
from vlm.data.batch import Batch
from vlm.data.fields import Field
from vlm.errors import Share, UserError, did_you_mean, find_similar, printable
from vlm.evaluation.metrics.bootstrap import Scorer, compute_differences
from vlm.evaluation.report.content import Finding, Section, TrainedModel, Verdict, choose_metric, make_verdict
from vlm.machine import GrowthLimiter
from vlm.models.flop import Work
from vlm.nn.device import widest_float
from vlm.randomness import key, seed_torch
from vlm.training.data_module import Data
from vlm.training.step.fsdp import gather, scatter, shard
from vlm.training.step.lightning_private import set_logged_step
from vlm.training.step.losses import Term
from vlm.training.step.optim import Optimization, total_steps
from vlm.training.step.step import StepState, is_logged, is_mid_step, sum_over_ranks
from vlm.untrusted.sizes import JsonValue


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

    def read(self, batch: Batch) -> None:
        """Counts the samples of a batch, and records the unreadable ones."""
        self.used += len(batch.ids)
        self.unreadable += [sample.reason for sample in batch.bad]

    def add_loss(self, terms: Mapping[str, Term]) -> None:
        """Adds the terms of a batch's loss."""
        for name, term in terms.items():
            if name not in self._terms:
                self._terms[name] = term.weight, torch.zeros(2, dtype=widest_float(self.device), device=self.device)
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
        local_terms = self.used, {name: (weight, *sums.tolist()) for name, (weight, sums) in self._terms.items()}
        gathered: list[Any] = [local_terms]
        if self.ranks > 1:  # a rank without a batch has no terms
            gathered = [None] * self.ranks
            torch.distributed.all_gather_object(gathered, local_terms)
        self.used, terms = sum(used for used, _ in gathered), [terms for _, terms in gathered]
        weights = {name: term[0] for rank in terms for name, term in rank.items()}
        if self.unreadable and not any(term[2] for rank in terms for term in rank.values()):
            raise UserError(f"evaluation: none of the samples can be read: {printable(self.unreadable[0])}", status=1)
        means = {}
        for name in weights:
            totals, counts = zip(*(rank[name][1:] for rank in terms if name in rank), strict=True)
            means[name] = sum(totals) / sum(counts) if sum(counts) else math.nan
        loss = sum(weight * means[name] for name, weight in weights.items()) if weights else math.nan
        return {"loss": loss, **({f"loss_{name}": mean for name, mean in means.items()} if len(means) > 1 else {})}


class TaskOptions(TypedDict):
    """Arguments of every task, for subclasses to pass on; `Task` describes them."""

    fields: Mapping[str, Any]
    seed: int
    optimization: NotRequired[Optimization | None]
    freeze: NotRequired[Sequence[str]]
    label_smoothing: NotRequired[Share]


class Task(L.LightningModule):
    """A model with its loss and metrics.

    Attributes:
        step: The current optimiser step of a training (vlm/training/step/step.py).
        evaluation: The last validation or test.
        about: Further entries of checkpoints: the model's specification, the config, the data's fingerprint.
        base_weights: Names of weights that the base of the adapters holds, so that checkpoints do not.
        trained: How the evaluated model was trained, for the verdict.
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
        parts = dict(model.named_modules())
        factors = optimization.lr_factors if optimization else {}
        for option, names in (("task.freeze", freeze), ("lr_factors", factors)):
            if unknown := [name for name in names if name not in parts]:
                children = ", ".join(name for name, _ in model.named_children())
                near = did_you_mean(find_similar(unknown[0], parts))
                raise UserError(f"{option}: the model has no module {unknown[0]}; it has {children}{near}")
        for name in freeze:
            model.get_submodule(name).requires_grad_(False).eval()  # the trainer does not change modes
        self.evaluation = EvaluationState("val")
        self.about: Metadata = {}
        self.base_weights: Collection[str] = ()
        self.trained = TrainedModel()

    name = ""  # of a task of vlm, in checkpoints and configs; other tasks are named package.module.Class there
    headlines: Sequence[str] = ()  # the few metrics that say most, for the report
    smaller_is_better: Sequence[str] = ("loss",)  # of the metrics that rank the runs of a sweep
    ablations: Sequence[str] = ()  # controls that a good model need not beat
    curves: Sequence[str] = ()  # metrics of validations that the report draws over steps
    unit = "images"  # what `size` counts
    remark = ""  # how to read the scores of the last evaluation, validations included
    counted_unit = "tokens"  # what the first loss term counts, in tasks that read text

    @property
    def data(self) -> Data:
        """The data module."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    @property
    def preprocess(self) -> Any:
        """The preprocessing of the task's images; None for a task without images."""
        return getattr(self.fields.get("images"), "preprocess", None)

    def use_start(self, start: Callable[[], nn.Module], stored: Mapping[str, Any]) -> None:
        """Called before a training or an evaluation, for a task that compares the model with the one it started from.

        Args:
            start: Builds the model with the weights from which training starts or started.
            stored: The metadata of the checkpoint that is resumed or evaluated; empty in a new run.
        """

    def loss(self, batch: Batch) -> dict[str, Term]:
        """The terms of a batch's loss, the same ones for each batch."""
        raise TypeError(f"{type(self).__name__} does not implement loss")

    def counts(self, batch: Batch) -> dict[str, int] | None:
        """The counts of a batch's loss terms, read on the host before it is sent to the device.

        None for a loss of one term, whose count is not needed before its sum.
        """
        return None

    @classmethod
    def compares_samples(cls, options: Mapping[str, Any]) -> bool:
        """Returns True if a loss term compares the samples of a batch, such as a contrastive loss.

        Args:
            options: The task's config.
        """
        return False

    def size(self, batch: Batch) -> int:
        """Size of a batch in `unit`, for the progress bar."""
        return len(batch.ids)

    def work(self, batch: Batch) -> Work:
        """Sizes of a batch, to count operations. It is called in every step and must not wait for the device."""
        return Work(images=len(batch.ids))

    def configure_model(self) -> None:
        shard(self.model, self.trainer.strategy)

    def train(self, mode: bool = True) -> "Task":
        super().train(mode)
        for name in self.freeze_names:  # a frozen part draws no dropout and keeps its statistics
            self.model.get_submodule(name).eval()
        return self

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch if device.type == "cpu" else batch.to(device, non_blocking=True)

    # One optimiser step; step.py shows what happens in it, from top to bottom.

    def on_fit_start(self) -> None:
        self.step = StepState(self.trainer, self.model)
        self.growth = GrowthLimiter()

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if self.trainer.training:
            set_logged_step(self.trainer, self.global_step)  # before the first hook that logs
        return batch

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        seed_torch(key(self.seed, "step", self.current_epoch, batch_idx, self.global_rank), self.device)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor | int]:
        terms = self.loss(batch)
        return {"loss": self.step.add(batch, terms), "count": next(iter(terms.values())).count}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        losses = self.step.average(optimizer)
        if is_logged(self.global_step + 1, self.trainer):  # a log of each step would cost 2% of it
            self.log_dict({f"train/{name}": value for name, value in losses.items()})

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.step.check_and_clip(optimizer, gradient_clip_val, by_value=gradient_clip_algorithm == "value")

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.growth.check(self.global_step)

    # Validation and test both compute the loss over the entire split and the task's metrics.

    def on_evaluation_start(self) -> None:
        """Begins an evaluation: its state is new, and metrics are reset."""
        gather(self.model)
        split = self.data.test_split if self.trainer.testing else "val"
        ranks, before = self.trainer.world_size, self.evaluation.results
        self.evaluation = EvaluationState(split, ranks=ranks, device=self.device, results=before)
        for module in self.modules():
            if isinstance(module, Metric):
                module.reset()

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        """Returns the metrics other than the split's mean loss; in a final evaluation, a test, with their controls."""
        raise TypeError(f"{type(self).__name__} does not implement evaluation_results")

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        """Adds a batch to the split's loss and to the metrics."""
        raise TypeError(f"{type(self).__name__} does not implement evaluation_step")

    def on_evaluation_end(self, *, final: bool) -> None:
        """Logs the results of an evaluation as split/metric."""
        split, losses = self.evaluation.split, self.evaluation.losses()
        results = {**losses, **self.evaluation_results(split, losses["loss"], final=final)}
        # Converted, because checkpoints store them and custom metrics may return NumPy scalars.
        self.evaluation.results = {f"{split}/{name}": float(value) for name, value in results.items()}
        if not (final and split == "val"):  # its curves, of validations, would end in a point of another kind
            self.log_dict(self.evaluation.results, rank_zero_only=False)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        return sum_over_ranks(tensor, self.trainer)

    def on_validation_epoch_start(self) -> None:
        if self.trainer.state.fn == "fit":
            # The step that it follows is not logged as done yet, unless it follows a part of one.
            set_logged_step(self.trainer, max(0, self.global_step - (not is_mid_step(self.trainer))))
        self.on_evaluation_start()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluation.read(batch)
        self.evaluation_step(batch, final=False)

    def on_validation_epoch_end(self) -> None:
        self.on_evaluation_end(final=False)

    def on_test_epoch_start(self) -> None:
        self.on_evaluation_start()

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.evaluation.read(batch)
        self.evaluation_step(batch, final=True)

    def on_test_epoch_end(self) -> None:
        self.on_evaluation_end(final=True)

    def on_validation_end(self) -> None:
        scatter(self.model)  # after the callbacks, which may look at the model too

    on_test_end = on_validation_end

    def configure_optimizers(self) -> OptimizerLRScheduler:
        assert self.optimization is not None, "this task was built for evaluation only"
        optimizer = self.optimization.create_optimizer(self.model)
        factors = self.optimization.factors(optimizer, total_steps(self.trainer) or 1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Sets the learning rates of a resumed run by its schedule, which may have changed since the checkpoint."""
        for config in self.trainer.lr_scheduler_configs:
            scheduler = cast(torch.optim.lr_scheduler.LambdaLR, config.scheduler)
            rates = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, highest, factor in rates:
                group["lr"] = highest * factor(scheduler.last_epoch)

    def description(self) -> dict[str, JsonValue]:
        """Returns what inference needs beyond the weights, in plain containers, for the checkpoint."""
        kind = type(self)
        task = self.name or f"{kind.__module__}.{kind.__qualname__}"  # where `vlm predict --trust` finds its predictor
        states = (field.state() for field in self.fields.values())
        return {"task": task, **{name: value for state in states for name, value in state.items()}}

    def predictions(self) -> Sequence[Mapping[str, Any]]:
        """Returns the predictions of the last evaluation, one record per sample, in plain containers."""
        raise TypeError(f"{type(self).__name__} does not implement predictions")

    def notes(self) -> list[str]:
        """Returns lines to print below the scores of the last evaluation, such as how a metric is defined."""
        return [line for finding in self.findings() for line in finding.lines()]

    def findings(self) -> list[Finding]:
        """Problems of the model that the last evaluation shows, such as texts that do not end."""
        return []

    def verdict(self) -> Verdict:
        """What the model of the last evaluation, a test, is better or worse than, and what to try next."""
        results = {name.split("/", 1)[1]: value for name, value in self.evaluation.results.items()}
        metric = choose_metric(results, self.verdict_metrics, smaller=self.smaller_is_better, ignored=self.ablations)
        difference = None
        if metric is not None and (sides := self.scorers(metric.name, metric.control)) is not None:
            model_scorer, control_scorer, samples = sides
            (difference,) = (
                compute_differences(control_scorer, model_scorer, samples, seed=self.seed) if samples > 1 else (None,)
            )
        has_size = self.trained.steps is not None and "train" in self.data.splits
        trained_on = f" ({self.training_size()} of train)" if has_size else ""
        ends = [results.get(f"{metric.name}@{end}") for end in ("low", "high")] if metric else []
        count = self.evaluation.used
        return make_verdict(
            metric,
            paired=difference,
            bounds=(ends[0], ends[1]) if len(ends) == 2 and None not in ends else None,  # type: ignore[arg-type]
            samples=f"{count:,} sample{'s' * (count != 1)} of {self.evaluation.split}{trained_on}",
            count=count,
            trained=self.trained,
            remedies=self.remedies(results),
        )

    @property
    def verdict_metrics(self) -> Sequence[str]:
        """The metrics by which the verdict judges the model, the one that says most first."""
        return self.headlines

    def training_size(self) -> str:
        """Returns the number of training samples, in words."""
        return f"{len(self.data.split('train')):,}"

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int] | None:
        """Returns the scorers of a metric of the model and of a control for resampled samples, each with one score.

        The third value is the number of samples. None if the last evaluation did not keep the control's outputs.
        """
        return None

    def remedies(self, results: Mapping[str, float]) -> Sequence[str] | None:
        """What to try if a control is as good as the model; None for what fits the training of any task.

        Args:
            results: Scores of the last evaluation without the split's name.
        """
        return None

    def details(self) -> Mapping[str, Any]:
        """Figures of each class or image in the last evaluation, in plain containers."""
        return {}

    def report(self) -> list[Section]:
        """Returns the sections that the task adds to the last evaluation's report."""
        return []

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        """Returns lines that show a training batch, with up to `tokens` tokens of its first sample."""
        raise TypeError(f"{type(self).__name__} does not implement reading")

    def example(self, data: Data, folder: Path) -> str:
        """Returns a command that uses the trained model, without its checkpoint; writes its files to `folder`."""
        raise TypeError(f"{type(self).__name__} does not implement example")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["format"] = FORMAT
        for entry in {"state_dict", "ema"} & checkpoint.keys() if self.base_weights else ():
            # Not changed in place: "ema" is the live average.
            weights = checkpoint[entry].items()
            checkpoint[entry] = {
                name: tensor for name, tensor in weights if name.removeprefix("model.") not in self.base_weights
            }
        checkpoint["vlm"] = {**self.about, **self.description(), "scores": self.evaluation.results}
