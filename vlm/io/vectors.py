"""Writes vectors of inputs to files: a NumPy matrix, or a column of Parquet."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from vlm.errors import UserError
from vlm.io.output import Output, Records
from vlm.io.parquet import require_pyarrow

FORMS = ("npy", "parquet")


def vector_form(vector: np.ndarray, form: str) -> Any:
    """Converts a vector for a form of records; numbers have as few digits as distinguish them in float32."""
    if form in FORMS:
        return vector
    numbers = vector.astype(str)
    return " ".join(numbers) if form in ("text", "csv") else list(map(float, numbers))


class VectorRecords(Records):
    """Collects records and writes them at the end: a NumPy matrix with one row per input, or a Parquet table.

    Args:
        form: One of FORMS.
        output: The output, which must be a file.
    Raises:
        UserError: There is no file, or the package of its form is not installed.
    """

    def __init__(self, form: str, output: Output) -> None:
        if output.path is None:
            raise UserError(f"--format {form} needs --out FILE")
        if form == "parquet":
            require_pyarrow("--format parquet")
        self.form, self.output = form, output
        self._rows: list[Mapping[str, Any] | None] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self._rows.append(record)

    def miss(self) -> None:
        self._rows.append(None)

    def __exit__(self, *fault: Any) -> None:
        if fault[0] is None and any(self._rows):
            self.output.write(self._matrix() if self.form == "npy" else self._table())

    def _matrix(self) -> bytes:
        """One row per input, NaN if it has no vector, so that rows correspond to inputs without names."""
        width = next(len(row["embedding"]) for row in self._rows if row)
        missing, file = np.full(width, np.nan, np.float32), io.BytesIO()
        np.save(file, np.stack([row["embedding"] if row else missing for row in self._rows]))
        return file.getvalue()

    def _table(self) -> bytes:
        import pyarrow
        from pyarrow.parquet import write_table

        rows = [row for row in self._rows if row]
        names = [row["input"].encode("utf-8", "backslashreplace").decode() for row in rows]
        values = np.stack([row["embedding"] for row in rows])
        vectors = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.ravel()), values.shape[1])
        file = io.BytesIO()
        write_table(pyarrow.table({"input": names, "embedding": vectors}), file)
        return file.getvalue()
