"""Samples of a split as batches of a task's fields."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from torch.utils.data import Dataset

from vlm.data.batch import BadSample, Batch
from vlm.data.fields import Field
from vlm.data.images.image import ImageError
from vlm.data.order import Key
from vlm.data.records import Split


class RecordDataset(Dataset):
    """The samples of a split, read a batch at a time; whatever worker reads one, it is the same.

    Args:
        split: The records.
        fields: What is read of each, by name.
        seed: Key of the augmentation in training; None in evaluation.
        repeats: How often a sample comes in a batch; above 1, the copy joins the key of its augmentation.
    """

    def __init__(self, split: Split, fields: Mapping[str, Field], *, seed: int | None = None, repeats: int = 1) -> None:
        self.split, self.fields, self.seed, self.repeats = split, fields, seed, repeats
        self._lengths: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, keys: Sequence[Key]) -> Batch:
        ids: list[str] = []
        rows: list[dict[str, Any]] = []
        bad: list[BadSample] = []
        for key in keys:
            record = self.split.record(key.index, key.epoch)
            try:
                rows.append({name: field.encode(record, self._key(key)) for name, field in self.fields.items()})
                ids.append(record.id)
            except ImageError as fault:
                bad.append(BadSample(record.id, str(fault)))
        values = {name: field.collate([row[name] for row in rows]) for name, field in self.fields.items()}
        return Batch(ids, values, bad)

    def _key(self, key: Key) -> tuple[int, ...] | None:
        if self.seed is None:
            return None
        copy = (key.copy,) if self.repeats > 1 else ()
        return self.seed, key.epoch, key.index, *copy

    def lengths(self, epoch: int) -> list[int]:
        """Length of each sample in an epoch, all fields together."""
        epoch = epoch if self.split.fresh else 0
        if self._lengths is None or self._lengths[0] != epoch:
            records = (self.split.record(index, epoch) for index in range(len(self)))
            fields = self.fields.values()
            self._lengths = epoch, [sum(field.length(record) for field in fields) for record in records]
        return self._lengths[1]


def fingerprint(split: Split, fields: Mapping[str, Field]) -> str:
    """A hash of the samples of a split: their names and what the fields read of them. Images are not opened.

    Of a split that is fresh in every epoch, the first and the last sample stand for all.
    """
    digest = blake2b(f"{len(split)}".encode(), digest_size=8)
    places = (0, len(split) - 1) if split.fresh else range(len(split))
    for record in (split.record(index) for index in places):
        parts = [record.id, *(part for field in fields.values() for part in field.fingerprint(record))]
        digest.update("\x1f".join([*parts, ""]).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def whole(batch: Any) -> Any:
    """A batch that `RecordDataset` made, for a loader that would collate it."""
    return batch
