"""Using a trained thermometer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlm.inference.predictor import BatchPredictor


class Reader(BatchPredictor):
    """Temperatures of readings, each four numbers parted by commas."""

    task = "thermometer.task.Thermometer"
    fields = ("readings", "temperature")

    def restore(self, about: Mapping[str, Any]) -> None:
        self.unit = str(about["degrees"])

    def prepare(self, source: str, options: Any) -> Tensor:
        return torch.tensor([float(part) for part in source.split(",")]).to(self.dtype)

    @torch.inference_mode()
    def predict(self, batch: Sequence[Tensor], options: Any) -> list[float]:
        return self.model(torch.stack(list(batch)).to(self.device))[0].tolist()

    def record(self, source: str, result: float, options: Any, *, form: str = "jsonl") -> Sequence[Mapping[str, Any]]:
        return [{"readings": source, "temperature": f"{result:.3f} {self.unit}"}]
