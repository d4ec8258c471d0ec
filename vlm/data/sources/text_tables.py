"""Tables of texts: with a label each, or with their translations."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, Unpack

from vlm.data.records import NAMES
from vlm.data.sources.tables import Cells, read_cells
from vlm.data.sources.text_source import FileOptions, Sample, TextSource
from vlm.errors import UserError


class TableOptions(FileOptions):
    """Constructor's arguments of all tables; see TableSource."""

    split_column: NotRequired[str]
    columns: NotRequired[Sequence[str] | None]
    delimiter: NotRequired[str | None]


class TableSource(TextSource):
    """CSV and TSV files with a header, JSON lines, or lines without a header.

    Args:
        named: Column of each part of a sample, by the part's name.
        split_column: Name of the column of splits; ``split`` may be absent.
        columns: The columns of files without a header, in their order; the last one holds the rest of the line.
        delimiter: What parts these columns; a tab by default.
        files: As `_read` takes them.
    Raises:
        UserError: A file or column is missing, or a row malformed.
    """

    spaces: str | None = None  # characters cut off at both ends of a cell; None for all white space

    def __init__(
        self,
        named: Mapping[str, str],
        *,
        split_column: str = "split",
        columns: Sequence[str] | None = None,
        delimiter: str | None = None,
        **files: Unpack[FileOptions],
    ) -> None:
        self._columns = {f"{name}_column": column for name, column in {**named, "split": split_column}.items()}
        self._lines: dict[str, Any] = {"names": columns, "delimiter": delimiter}
        self._read(**files)

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
        for key, value in cells.values.items():
            name = key.removesuffix("_column")
            if name == "split":
                continue
            value = "" if value is None else value  # JSON's null is an empty cell
            if not isinstance(value, str) and not (name == "label" and isinstance(value, int)):  # a bool is one too
                raise UserError(f"{path}, {cells.where}: {name} {value!r} is not text; put it in quotes")
            known[name] = str(value).strip(self.spaces)
        return known


class TextTable(TableSource):
    """Texts, or pairs of texts, with labels.

    Args:
        text_column: Name of the column of texts.
        pair_column: Name of the column of second texts; None where a sample is one text.
        label_column: Name of the column of labels.
        options: As TableSource takes them; each class is held out of by its share.
    Raises:
        UserError: As TableSource; or there are fewer than two labels, or val or test have one that train lacks.
    """

    holds = ("text", "label")
    name = "texts"

    def __init__(
        self,
        *,
        text_column: str = "text",
        pair_column: str | None = None,
        label_column: str = "label",
        **options: Unpack[TableOptions],
    ) -> None:
        pair = {} if pair_column is None else {"pair": pair_column}
        super().__init__({"text": text_column, **pair, "label": label_column}, **options)
        self._number_labels(options["path"])

    def _number_labels(self, path: str) -> None:
        """Gives each label its number, in the order of their names."""
        if "train" not in self._samples:
            raise UserError(f"{path}: has no samples of train, only of {' and '.join(self._samples)}; give some")
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


class TranslationTable(TableSource):
    """Texts with their translations.

    Args:
        text_column: Name of the column of texts.
        translation_column: Name of the column of translations.
        options: As TableSource takes them.
    Raises:
        UserError: As TableSource.
    """

    holds = ("text", "translation")
    name = "translations"
    spaces = " \t\r\n"  # a no-break space is part of a text

    def __init__(
        self,
        *,
        text_column: str = "text",
        translation_column: str = "translation",
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__({"text": text_column, "translation": translation_column}, **options)
