"""metrics.csv in the run's folder."""

import csv
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from vlm.callbacks.writing import write_text


class CSVLogger(Logger):
    """Writes `metrics.csv`: a row a step, a column a metric; a resumed run goes on in the same file.

    Args:
        folder: The run's folder.
    """

    def __init__(self, *, folder: str) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self.rows: list[dict[str, Any]] = []
        self._read = False

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @property
    @rank_zero_experiment
    def experiment(self) -> list[dict[str, Any]]:
        return self.rows

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The run's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not self._read:
            self._read = True
            if self.path.is_file():
                with self.path.open(newline="") as file:
                    # What was logged after the checkpoint that the run resumed from is done again.
                    self.rows = [row for row in csv.DictReader(file) if int(row["step"]) <= (step or 0)]
        step = step or 0
        if self.rows and int(self.rows[-1]["step"]) == step:
            self.rows[-1].update(metrics)
        else:
            self.rows.append({"step": step, **metrics})

    @rank_zero_only
    def save(self) -> None:
        if not self.rows:
            return
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, columns, restval="")
        writer.writeheader()
        writer.writerows(self.rows)
        write_text(self.path, table.getvalue())

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()
