"""A moving average of the weights."""

from typing import Annotated, Any

import lightning as L
import torch
from torch import Tensor

from vlm.errors import Range
from vlm.training.step.fsdp import like


class EMA(L.Callback):
    """Keeps an exponential moving average of the weights and evaluates with it (Polyak and Juditsky 1992).

    Args:
        decay: Share of the average that is kept at each step; less in early steps, (1 + step) / (10 + step).
    """

    def __init__(self, *, decay: Annotated[float, Range(above=0, below=1)]) -> None:
        self.decay = decay
        self.average: dict[str, Tensor] = {}
        self._raw: dict[str, Tensor] = {}
        self._step = -1

    def _tensors(self, pl_module: L.LightningModule) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in pl_module.state_dict().items() if tensor.is_floating_point()}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        tensors = self._tensors(pl_module)
        loaded = self.average
        self.average = {
            name: like(loaded.get(name, tensor), tensor).clone().to(tensor.device) for name, tensor in tensors.items()
        }
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        decay = min(self.decay, (1 + self._step) / (10 + self._step))
        tensors = self._tensors(pl_module)
        torch._foreach_lerp_([self.average[name] for name in tensors], list(tensors.values()), 1 - decay)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.average and not self._raw:
            self._raw = {name: tensor.clone() for name, tensor in self._tensors(pl_module).items()}
            self._set(pl_module, self.average)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._raw:
            self._set(pl_module, self._raw)
            self._raw = {}

    def _set(self, pl_module: L.LightningModule, values: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._tensors(pl_module).items():
                tensor.copy_(values[name])

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.average:
            checkpoint["ema"] = self.average
        if self._raw:  # saved during a validation; training continues from the raw weights
            checkpoint["state_dict"] = {**checkpoint["state_dict"], **self._raw}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.average = dict(checkpoint.get("ema", {}))
