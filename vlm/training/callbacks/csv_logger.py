"""metrics.csv and throughput.csv in the run's folder."""

import csv
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from vlm.errors import Injected
from vlm.io.atomic import write_text
from vlm.io.output import csv_text

APART = "throughput/"  # prefix of figures that depend on the clock; a resumed run repeats all others bit for bit


class Table:
    """A CSV file with one row per step and one column per metric; a resumed run appends to it.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.columns: dict[str, None] = {}
        self._read = False
        self._text, self._texts = "", 0  # text of the header and the first rows, and the number of these rows

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Adds metrics to the row of a step, the last one or a new one."""
        if not self._read:
            self._read = True
            self._restore(step)
        if self.rows and int(self.rows[-1]["step"]) == step:
            self.rows[-1].update(metrics)
        else:
            self.rows.append({"step": step, **metrics})
        if not self.rows[-1].keys() <= self.columns.keys():
            self.columns |= dict.fromkeys(self.rows[-1])
            self._text, self._texts = self._lines([dict(zip(self.columns, self.columns, strict=True))]), 0

    def _restore(self, step: int) -> None:
        if self.path.is_file():
            with self.path.open(newline="") as file:
                # A resumed run repeats the steps after its checkpoint, so their rows are dropped.
                self.rows = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
            self.columns = dict.fromkeys(name for row in self.rows for name in row)
            self._text = self._lines([dict(zip(self.columns, self.columns, strict=True))])

    def _lines(self, rows: list[dict[str, Any]]) -> str:
        return csv_text(([row.get(name) for name in self.columns] for row in rows), end="\r\n")

    def save(self) -> None:
        """Writes the file, if there is anything to write.

        Raises:
            OSError: It cannot be written.
        """
        if not self.rows:
            return
        done = len(self.rows) - 1  # the last row may still grow
        self._text += self._lines(self.rows[self._texts : done])
        self._texts = done
        write_text(self.path, self._text + self._lines(self.rows[-1:]))


class CSVLogger(Logger):
    """Writes `metrics.csv`, and `throughput.csv` with what depends on the clock.

    Args:
        folder: The run's folder.
    """

    def __init__(self, *, folder: Injected[str]) -> None:
        super().__init__()
        self.metrics, self.throughput = (Table(Path(folder) / f"{name}.csv") for name in ("metrics", "throughput"))

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> list[dict[str, Any]]:
        return self.metrics.rows

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the run's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        apart = {name.removeprefix(APART): value for name, value in metrics.items() if name.startswith(APART)}
        if apart:
            self.throughput.add(apart, step or 0)
        if len(apart) < len(metrics):
            self.metrics.add({name: value for name, value in metrics.items() if not name.startswith(APART)}, step or 0)

    @rank_zero_only
    def save(self) -> None:
        self.metrics.save()
        self.throughput.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()
