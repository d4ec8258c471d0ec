"""Tables of texts with their translations."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vlm.data.sources.tables import read_cells
from vlm.data.sources.text_source import Sample, TextSource
from vlm.errors import Share, UserError


class TranslationTable(TextSource):
    """Texts with their translations: CSV and TSV files with a header, JSON lines, or lines without a header.

    Args:
        text_column: Name of the column of texts.
        translation_column: Name of the column of translations.
        others: As in `vlm.data.sources.text_tables.TextTable`.
    Raises:
        UserError: A file or column is missing, or a row malformed.
    """

    holds = ("text", "translation")
    name = "translations"

    def __init__(
        self,
        *,
        path: str,
        val_path: str | None = None,
        test_path: str | None = None,
        text_column: str = "text",
        translation_column: str = "translation",
        split_column: str = "split",
        columns: Sequence[str] | None = None,
        delimiter: str | None = None,
        val_fraction: Share = 0.1,
        test_fraction: Share = 0.1,
        seed: int = 0,
    ) -> None:
        self._columns = {"text_column": text_column, "translation_column": translation_column}
        self._columns |= {"split_column": split_column}
        self._lines: dict[str, Any] = {"names": columns, "delimiter": delimiter}
        paths = {"train": path, "val": val_path, "test": test_path}
        self._read(paths, val_fraction=val_fraction, test_fraction=test_fraction, seed=seed)

    def samples(self, path: Path) -> Iterator[Sample]:
        for cells in read_cells(path, self._columns, **self._lines):
            known = {name: cells.values[f"{name}_column"] for name in self.holds}
            if not all(isinstance(value, str) for value in known.values()):
                raise UserError(f"{path}, {cells.where}: text and translation must be text; put them in quotes")
            known = {name: value.strip(" \t\r\n") for name, value in known.items()}
            empty = [name for name, value in known.items() if not value]
            if empty:
                self._skip(path, cells.where, f"no {empty[0]}", "empty text")
            else:
                yield Sample(cells.where.removeprefix("line "), known, cells.split(path))
