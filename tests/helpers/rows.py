"""A source of rows in memory, and fields that are opened with it."""

from collections.abc import Mapping, Sequence
from typing import Any

from vlm.data.fields import Field, learn_tokenizers
from vlm.data.records import ListSplit, Record, Source, Split


class RowSource(Source):
    """Records with these values, by split; their ids are numbers."""

    def __init__(self, rows: Mapping[str, Sequence[Mapping[str, Any]]], **about: Sequence[str]) -> None:
        self.rows, self.splits = rows, tuple(rows)
        vars(self).update(about)

    def open(self, name: str) -> Split:
        return ListSplit(list(enumerate(self.rows[name])), lambda row, epoch: Record(f"{row[0]}", dict(row[1])))


def open_fields(source: Source, *fields: Field) -> None:
    """Prepares fields as training does, without files."""
    for field in fields:
        field.open(source, {name: source.split(name) for name in source.splits}, seed=0, cache=None)
    learn_tokenizers(fields, None)
    for field in fields:
        field.prepare()
