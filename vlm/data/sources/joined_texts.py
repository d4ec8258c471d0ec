"""Texts of several sources, for masked language modelling."""

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

from vlm.data.records import NAMES, Record, Source, Split
from vlm.errors import UserError


class JoinedTexts(Source):
    """Concatenates the texts of several sources in each split.

    Args:
        sources: Sources whose records have a text.
    Raises:
        UserError: There is no source, or the records of one have no text.
    """

    holds = ("text",)
    name = "joined_texts"

    def __init__(self, *, sources: Sequence[Source]) -> None:
        if not sources:
            raise UserError("data.source.sources: is empty; give at least one source")
        for source in sources:
            if "text" not in source.holds:
                raise UserError(f"data.source.sources: {source.name} has no text; remove it")
        self.sources = sources
        self.splits = tuple(name for name in NAMES if any(name in source.splits for source in sources))
        self.notes = [line for source in sources for line in source.notes]
        self.skipped = [line for source in sources for line in source.skipped]

    def open(self, name: str) -> Split:
        names = [source.name for source in self.sources]  # numbered if sources have the same name
        names = [own if names.count(own) == 1 else f"{own} {place}" for place, own in enumerate(names, 1)]
        pairs = zip(names, self.sources, strict=True)
        return _Joined([(own, source.open(name)) for own, source in pairs if name in source.splits])


class _Joined(Split):
    """The records of several splits in sequence, with ids that begin with the source's name."""

    def __init__(self, parts: Sequence[tuple[str, Split]]) -> None:
        self.parts, self.fresh = parts, any(split.fresh for _, split in parts)
        self.begins = [0, *accumulate(len(split) for _, split in parts)]

    def __len__(self) -> int:
        return self.begins[-1]

    def record(self, index: int, epoch: int = 0) -> Record:
        at = bisect(self.begins, index) - 1
        source, split = self.parts[at]
        record = split.record(index - self.begins[at], epoch)
        return Record(f"{source} {record.id}", {"text": record["text"]}, read_stamp=record.read_stamp)
