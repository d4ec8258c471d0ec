"""The one LightningModule base: optimiser steps that are exact under accumulation, ranks and resume."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from vlm.checkpoint.names import FORMAT
from vlm.data.fields import Field
from vlm.models.flop import Work
from vlm.randomness import key, seed_torch
from vlm.training import step as steps
from vlm.training.data_module import Data
from vlm.training.fsdp import gather, load, scatter, shard
from vlm.training.loop_counters import settle, total_steps, validates
from vlm.training.optim import Optimization


class Task(L.LightningModule):
    """A model with its loss and metrics.

    The loss of an optimiser step is a sum over tokens divided by their count over all ranks and accumulated batches:
    a batch returns its sum, and the gradients are divided once, after unscaling and before clipping.

    Attributes:
        samples: Some inputs of the last evaluation with what the model made of them, for people to look at: each has
            at least "line", what is printed.
        unread: A reason for each sample of the last evaluation that could not be read.
        validation_due: Whether what is saved now goes on with a validation; set by who saves.
        counted: What the losses of training steps were sums over: tokens, or images of a classifier. It stays on the
            device; who reads it, sets it back.
    Args:
        model: What is trained.
        fields: What the task reads of each record, by the names that its batches have.
        optimization: How it is trained; None for a model that is only evaluated.
        seed: Key of dropout and of all else that is random in a step.
        freeze: Names of submodules of the model that are not trained, such as "encoder".
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        fields: Mapping[str, Field],
        optimization: Optimization | None,
        seed: int,
        freeze: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.model, self.fields = model, fields
        self.optimization, self.seed, self.freeze_names = optimization, seed, freeze
        for name in freeze:
            model.get_submodule(name).requires_grad_(False).eval()  # the trainer leaves modes as they are
        self._step = steps.Step()
        self.results: dict[str, float] = {}
        self.samples: list[dict[str, Any]] = []
        self.unread: list[str] = []
        self.validation_due = False
        self.counted: Tensor | int = 0
        self.test_split = "test"
        self.about: dict[str, Any] = {}

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The summed loss of a batch, and the count that it is a sum over."""
        raise TypeError(f"{type(self).__name__} defines no loss")

    name = ""  # of the task, as checkpoints and configs have it
    unit = "images"  # what `size` counts

    def size(self, batch: Any) -> int:
        """How much training reads in a batch, for the progress bar."""
        return len(batch.ids)

    def work(self, batch: Any) -> Work:
        """What a batch is to the model; asked in every step, so that it may not wait for the device."""
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
        total, count = self.loss(batch)
        self._step.add(batch.ids, total, count)
        self.counted = self.counted + count
        # Lightning will divide by the accumulated batches, and DDP by the ranks.
        return total * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        steps.unscale(optimizer, self.trainer)
        total, count = self._summed(self._step.sums())
        gradients = steps.gradients(optimizer)
        torch._foreach_div_(gradients, count.clamp(min=1).to(gradients[0].dtype))
        self._loss = total / count.clamp(min=1)
        self.log("train/loss", self._loss, prog_bar=True)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the gradients, and stops the run before the update if they or the loss are not finite."""
        norm = steps.total_norm(optimizer)
        steps.check(self.trainer, self.model, self._step, self._loss, norm)
        self._step = steps.Step()
        if gradient_clip_val:
            steps.clip(optimizer, gradient_clip_val, None if gradient_clip_algorithm == "value" else norm)

    def on_train_start(self) -> None:
        self._step = steps.Step()

    def _summed(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors."""
        return self.trainer.strategy.reduce(tensor, reduce_op="sum") if self.trainer.world_size > 1 else tensor

    # Validation and test are one evaluation: a loss over the whole split, and what a task adds to it.

    def on_evaluation_start(self) -> None:
        """Forgets what an earlier evaluation gathered."""
        gather(self.model)
        self.samples = []
        self.unread = []
        self._eval_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self._eval_count = torch.zeros((), dtype=torch.float64, device=self.device)

    def add_loss(self, total: Tensor, count: Tensor) -> None:
        """Adds a batch's summed loss to that of the split."""
        self._eval_sum += total
        self._eval_count += count

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        """What the task measures beside the split's mean loss; with its controls if the evaluation is final."""
        raise TypeError(f"{type(self).__name__} measures nothing")

    def on_evaluation_end(self, split: str, *, final: bool) -> None:
        """Logs the results of an evaluation as split/metric."""
        total, count = self._summed(torch.stack([self._eval_sum, self._eval_count]))
        loss = (total / count).item()
        results = self.evaluation_results(split, loss, final=final)
        self.results = {f"{split}/{name}": value for name, value in {"loss": loss, **results}.items()}
        self.log_dict(self.results, rank_zero_only=False)

    def on_validation_epoch_start(self) -> None:
        self.on_evaluation_start()

    def on_validation_epoch_end(self) -> None:
        self.on_evaluation_end("val", final=False)

    def on_test_epoch_start(self) -> None:
        self.on_evaluation_start()

    def on_test_epoch_end(self) -> None:
        self.on_evaluation_end(self.test_split, final=True)

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
        """What using the trained model needs beyond its weights, in plain containers, for the checkpoint."""
        states = (field.state() for field in self.fields.values())
        return {"task": self.name, **{name: value for state in states for name, value in state.items()}}

    def predictions(self) -> list[dict[str, Any]]:
        """What the last evaluation predicted, a record a sample, in plain containers."""
        raise TypeError(f"{type(self).__name__} predicts nothing")

    def details(self) -> dict[str, Any]:
        """What the last evaluation found out of each class or image, in plain containers."""
        return {}

    def reading(self, batch: Any, tokens: int) -> list[str]:
        """Lines that show what a training batch holds, with up to so many tokens of its first sample."""
        raise TypeError(f"{type(self).__name__} shows no batch")

    def example(self, data: Data, folder: Path) -> str:
        """A command that uses the trained model, less its checkpoint; what it needs is put into the folder."""
        raise TypeError(f"{type(self).__name__} has no example")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["format"] = FORMAT
        checkpoint["vlm"] = {**self.about, **self.description(), "scores": self.results}
        loops = checkpoint.get("loops", {}).get("fit_loop")
        if loops:
            steps.refuse_non_finite(self.trainer, checkpoint)
            batches = int(self.trainer.num_training_batches)
            after = {"validates": validates(self.trainer), "validation_due": self.validation_due}
            settle(loops, epoch_batches=batches, step=self.global_step, **after)
