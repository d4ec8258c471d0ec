"""A metric with one line of JSON per sample as its state, exact for any number of processes."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from vlm.errors import UserError

S = TypeVar("S", bound=tuple[Any, ...])


class RecordMetric(Metric):
    """Base of metrics over whole samples; a subclass adds records and computes from them.

    Records are sorted by sample id, and repeated samples count once, so that results do not depend on the order or the
    number of processes.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = True
    records: list[Tensor] | Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("records", default=[], dist_reduce_fx="cat")
        self._start()

    def reset(self) -> None:
        super().reset()
        self._start()

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Adds records of plain values; the first value is the sample's unique id."""
        lines = "".join(json.dumps(list(row)) + "\n" for row in rows)
        self.records.append(_encode(lines, self.device))  # type: ignore[union-attr]

    def rows(self) -> dict[str, list[Any]]:
        """The other values of each record by sample id, sorted; of all processes during `compute`."""
        lines = bytes(dim_zero_cat(self.records).cpu().numpy()).decode("ascii").splitlines()
        rows: dict[str, list[Any]] = {}
        for sample, *values in sorted(map(json.loads, lines)):
            rows.setdefault(sample, values)
        return rows

    def _start(self) -> None:
        # A process without samples must still gather, with the same type as the others.
        self.records = [_encode("", self.device)]


class SampleMetric(RecordMetric, Generic[S]):
    """Base of metrics whose samples are named tuples.

    Attributes:
        kind: Class of the samples, set by a subclass.
        unit: Noun for a sample, set by a subclass.
        samples: Samples of the last `gather` by id.
    """

    kind: type[S]
    unit: str
    samples: dict[str, S]

    def update(self, ids: Sequence[str], samples: Sequence[S]) -> None:
        """Adds some samples.

        Args:
            ids: Unique id of each sample.
        """
        self.add((id, *sample) for id, sample in zip(ids, samples, strict=True))

    def gather(self) -> list[S]:
        """The samples of all processes.

        Raises:
            UserError: There are no samples.
        """
        self.samples = {id: self.kind(*row) for id, row in self.rows().items()}
        if not self.samples:
            raise UserError(f"no {self.unit} to score: the split is empty", status=1)
        return list(self.samples.values())

    def rows_of(self) -> list[dict[str, Any]]:
        """The samples as dicts, with their ids."""
        return [{"id": id, **sample._asdict()} for id, sample in self.samples.items()]  # type: ignore[attr-defined]

    def _start(self) -> None:
        super()._start()
        self.samples = {}


def _encode(text: str, device: torch.device) -> Tensor:
    if not text:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8).to(device)
