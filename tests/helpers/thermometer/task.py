"""The task: two loss terms of different counts, a metric of its own, a section of the report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from thermometer.model import Regressor
from thermometer.predictor import Reader
from vlm.data.batch import Batch
from vlm.evaluation.report.content import Section, Table
from vlm.training.step.losses import Term
from vlm.training.step.task import Task


class Thermometer(Task):
    """Temperature of all readings, and an alarm where one is known.

    Args:
        alarm_weight: Weight of the alarm's term.
    """

    predictor = Reader
    headlines = ("error",)
    model: Regressor

    def __init__(self, *, fields: Mapping[str, Any], alarm_weight: float, **options: Any) -> None:
        super().__init__(fields=fields, **options)
        self.alarm_weight = alarm_weight

    def loss(self, batch: Batch) -> dict[str, Term]:
        readings = batch["readings"]
        temperature, alarm = self.model(readings.numbers)
        squares = (temperature - readings.temperature).square().sum()
        rings = F.binary_cross_entropy_with_logits(alarm[readings.places], readings.alarm, reduction="sum")
        return {
            "temperature": Term(squares, len(temperature)),
            "alarm": Term(rings, len(readings.places), self.alarm_weight),
        }

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"temperature": len(batch.ids), "alarm": len(batch["readings"].places)}

    def on_evaluation_start(self) -> None:
        super().on_evaluation_start()
        self.errors: list[tuple[str, float]] = []

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        self.evaluation.add_loss(self.loss(batch))
        found = self.model(batch["readings"].numbers)[0] - batch["readings"].temperature
        self.errors += zip(batch.ids, found.abs().tolist(), strict=True)

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        self.evaluation.samples = [{"line": f"{id} is off by {error:.2f}"} for id, error in self.errors[:2]]
        return {"error": float(torch.tensor([error for _, error in self.errors]).mean())}

    def predictions(self) -> list[dict[str, Any]]:
        return [{"id": id, "error": error} for id, error in self.errors]

    def report(self) -> list[Section]:
        rows = [(id, f"{error:.3f}") for id, error in self.errors[:5]]
        return [Section("Thermometer", [Table(["reading", "off by"], rows)])]

    def description(self) -> dict[str, Any]:
        return {**super().description(), "degrees": "C"}

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        return [f"batch       {len(batch.ids)} readings"]

    def example(self, data: Any, folder: Path) -> str:
        return "vlm predict 1,2,3,4 --trust thermometer"
