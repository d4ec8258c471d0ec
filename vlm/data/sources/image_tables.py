"""Tables of images for classification."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from vlm.data.records import Record, refuse
from vlm.data.sources.caption_source import check_missing
from vlm.data.sources.captions import root_of
from vlm.data.sources.column_images import FolderWithTables, within
from vlm.data.sources.text_source import Sample
from vlm.data.sources.text_tables import TableOptions, TableSource, TextTable

Row = tuple[str, Mapping[str, Any]]


class ImageTable(TextTable):
    """Images with labels, one per row: Parquet and folders of `datasets` with images, or any table of file names.

    Args:
        root: Folder that image names are relative to; default the table's folder.
        image_column: Name of the column of images.
        label_column: Name of the column of labels.
        options: See TableSource; held-out samples are stratified by class.
    Raises:
        UserError: As in TextTable; or too many images are missing.
    """

    holds = ("image", "label")
    name = "image_table"

    def __init__(
        self,
        *,
        image_column: str = "image",
        label_column: str = "label",
        **options: Unpack[TableOptions],
    ) -> None:
        root = root_of(options.get("root"), options["path"])
        self.place = FolderWithTables(Path(root), image_column)
        TableSource.__init__(self, {"image": image_column, "label": label_column}, **options)
        for split, rows in self._samples.items():
            self._samples[split] = self._present(rows, options["path"])
        self._number_labels(options["path"])

    def _parts(self, path: Path, samples: list[Sample], fractions: dict[str, float], seed: int) -> dict[str, list[Row]]:
        known: dict[str, Sample] = {}
        for one in samples:
            before = known.setdefault(self._drawn_as(one), one)
            if (before.known["label"], before.split) != (one.known["label"], one.split):
                refuse(
                    f"{path}, {one.where}: {one.known['image']} has another label or split in {before.where}; fix one"
                )
        return super()._parts(path, list(known.values()), fractions, seed)

    def _drawn_as(self, sample: Sample) -> str:
        return within(sample.known["image"], self.place.path)

    def _present(self, rows: list[Row], path: str) -> list[Row]:
        """The rows with existing images; missing ones are listed in `skipped`."""
        names = [within(known["image"], self.place.path) for _, known in rows]
        present = {name for name in set(names) if self.place.has(name)}
        absent = [name for name in names if name not in present]
        self.skipped += check_missing(self.place, absent, len(rows), Path(path), self.place.path)
        pairs = zip(names, rows, strict=True)
        return [(id, {**known, "image": name}) for name, (id, known) in pairs if name in present]

    def _record(self, split: str, sample: Row, epoch: int) -> Record:
        id, known = sample
        read = (partial(function, known["image"]) for function in (self.place.image, self.place.read, self.place.stamp))
        return Record(id, {"label": known["label"], "class": known["class"]}, *read)  # type: ignore[arg-type]
