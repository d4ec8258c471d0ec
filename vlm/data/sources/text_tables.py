"""Tables of texts, or of pairs of texts, with a label each."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm.data.records import NAMES
from vlm.data.sources.tables import Cells, read_cells
from vlm.data.sources.text_source import Sample, TextSource
from vlm.errors import Share, UserError


class TextTable(TextSource):
    """Texts with labels: CSV and TSV files with a header, JSON lines, or lines without a header.

    Args:
        path: The file; of training alone where `val_path` or `test_path` is given.
        val_path: A file of validation.
        test_path: A file of test.
        text_column: Name of the column of texts.
        pair_column: Name of the column of second texts; None where a sample is one text.
        label_column: Name of the column of labels.
        split_column: Name of the column of splits; ``split`` may be absent.
        columns: The columns of files without a header, in their order; the last one holds the rest of the line.
        delimiter: What parts these columns; a tab by default.
        val_fraction: Part of each class held out for validation where a single file states no splits.
        test_fraction: Part of each class held out for test there.
        seed: Seed of which samples are held out.
    Raises:
        UserError: A file or column is missing, a row malformed, there are fewer than two labels, or val or test have
            one that train lacks.
    """

    holds = ("text", "label")
    name = "texts"

    def __init__(
        self,
        *,
        path: str,
        val_path: str | None = None,
        test_path: str | None = None,
        text_column: str = "text",
        pair_column: str | None = None,
        label_column: str = "label",
        split_column: str = "split",
        columns: Sequence[str] | None = None,
        delimiter: str | None = None,
        val_fraction: Share = 0.1,
        test_fraction: Share = 0.1,
        seed: int = 0,
    ) -> None:
        self._columns = {"text_column": text_column, "label_column": label_column, "split_column": split_column}
        self._columns |= {} if pair_column is None else {"pair_column": pair_column}
        self._lines: dict[str, Any] = {"names": columns, "delimiter": delimiter}
        paths = {"train": path, "val": val_path, "test": test_path}
        self._read(paths, val_fraction=val_fraction, test_fraction=test_fraction, seed=seed)
        self._number_labels(path)

    def samples(self, path: Path) -> Iterator[Sample]:
        for cells in read_cells(path, self._columns, **self._lines):
            known = self._known(path, cells)
            empty = [name for name, value in known.items() if not value]
            if empty:
                self._skip(path, cells.where, f"no {empty[0]}", "empty text" if empty[0] != "label" else "no label")
            else:
                yield Sample(cells.where.removeprefix("line "), known, cells.split(path))

    def _known(self, path: Path, cells: Cells) -> dict[str, str]:
        known = {}
        for name in ("text", "pair", "label"):
            if (key := f"{name}_column") in cells.values:
                value = cells.values[key]
                plain = isinstance(value, str) or (name == "label" and isinstance(value, int))  # a bool is one too
                if not plain:
                    raise UserError(f"{path}, {cells.where}: {name} {value!r} is not text; put it in quotes")
                known[name] = str(value).strip()
        return known

    def _number_labels(self, path: str) -> None:
        """Gives each label its number, in the order of their names."""
        self.classes = sorted({known["label"] for _, known in self._samples["train"]})
        if len(self.classes) < 2:
            raise UserError(f"{path}: has one label alone, {self.classes[0]}, where there must be two or more")
        labels = {name: label for label, name in enumerate(self.classes)}
        for split in NAMES:
            self._samples |= {split: [self._numbered(split, row, labels) for row in self._samples.get(split, [])]}

    def _numbered(
        self, split: str, row: tuple[str, Mapping[str, Any]], labels: Mapping[str, int]
    ) -> tuple[str, Mapping[str, Any]]:
        id, known = row
        name = known["label"]
        if name not in labels:
            raise UserError(f"data: the label {name!r} of {id} in {split} is none of train's; mend it, or add to train")
        return id, {**known, "label": labels[name], "class": name}
