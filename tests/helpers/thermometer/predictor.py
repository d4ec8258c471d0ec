"""Using a trained thermometer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vlm.inference.predictor import Predictor
from vlm.io.output import Records


class Reader(Predictor):
    """Temperatures of readings, each four numbers parted by commas."""

    task = "thermometer.task.Thermometer"
    fields = ("readings", "temperature")

    def restore(self, about: Mapping[str, Any]) -> None:
        self.unit = str(about["degrees"])

    def predict(self, inputs: Sequence[str], records: Records, *, batch_size: int) -> int:
        for text in inputs:
            numbers = torch.tensor([[float(part) for part in text.split(",")]]).to(self.dtype)
            with torch.inference_mode():
                value = self.model(numbers)[0].item()
            records.write({"readings": text, "temperature": f"{value:.3f} {self.unit}"})
        return 0
