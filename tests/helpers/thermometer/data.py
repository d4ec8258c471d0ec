"""Sensors whose readings are drawn, and the field that reads them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlm.data.batch import Tensors
from vlm.data.fields import AugmentKey, Field
from vlm.data.records import NAMES, ListSplit, Record, Source, Split
from vlm.randomness import numpy_rng

SENSORS = 4


class Sensors(Source):
    """Readings of four sensors, the temperature behind them, and for every third whether an alarm rang.

    Args:
        train: Number of training records.
    """

    holds = ("numbers", "temperature")
    name = "sensors"
    splits = NAMES

    def __init__(self, *, train: int) -> None:
        self.counts = {"train": train, "val": 16, "test": 20}

    def open(self, name: str) -> Split:
        return ListSplit(range(self.counts[name]), lambda index, epoch: self._record(name, index))

    def _record(self, split: str, index: int) -> Record:
        numbers = numpy_rng("sensors", split, index).standard_normal(SENSORS).tolist()
        temperature = sum(place * number for place, number in enumerate(numbers))
        known = {"numbers": numbers, "temperature": temperature}
        return Record(f"{split}/{index}", known | ({"alarm": temperature > 0} if index % 3 == 0 else {}))


@dataclass
class Readings(Tensors):
    """Readings of a batch; of those at `places` the alarm is known.

    Shapes:
        numbers (B, 4), temperature (B,), alarm (M,), places (M,)
    """

    numbers: Tensor
    temperature: Tensor
    alarm: Tensor
    places: Tensor


class Numbers(Field):
    """The readings of a record."""

    needs = ("numbers", "temperature")

    def identity(self, record: Record) -> Sequence[str]:
        return [repr(record["numbers"])]

    def encode(self, record: Record, key: AugmentKey | None) -> Record:
        return record

    def collate(self, values: Sequence[Record]) -> Readings:
        known = [place for place, record in enumerate(values) if "alarm" in record]
        return Readings(
            torch.tensor([record["numbers"] for record in values]).view(-1, SENSORS),
            torch.tensor([record["temperature"] for record in values]),
            torch.tensor([float(values[place]["alarm"]) for place in known]),
            torch.tensor(known, dtype=torch.long),
        )
