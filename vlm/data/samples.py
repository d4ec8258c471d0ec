"""Data set of batches of a task's fields."""

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
    """The samples of a split, read a batch at a time; the result does not depend on the worker.

    Args:
        split: The records.
        fields: Fields to read, by name.
        seed: Seed of augmentation in training; None in evaluation.
        repeats: Number of times a sample occurs in a batch; if greater than 1, the copy is part of the augmentation
            key.
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
        """Length of each sample in an epoch, summed over fields."""
        epoch = epoch if self.split.fresh else 0
        if self._lengths is None or self._lengths[0] != epoch:
            records = (self.split.record(index, epoch) for index in range(len(self)))
            fields = self.fields.values()
            self._lengths = epoch, [sum(field.length(record) for field in fields) for record in records]
        return self._lengths[1]


def dataset_fingerprint(split: Split, fields: Mapping[str, Field]) -> str:
    """A hash of the samples of a split: their ids and what the fields read, without opening images.

    For a fresh split, only the first and the last sample are hashed.
    """
    digest = blake2b(f"{len(split)}".encode(), digest_size=8)
    places = (0, len(split) - 1) if split.fresh else range(len(split))
    for record in (split.record(index) for index in places):
        parts = [record.id, *(part for field in fields.values() for part in field.identity(record))]
        digest.update("\x1f".join([*parts, ""]).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def whole(batch: Any) -> Any:
    """The collate function for batches that `RecordDataset` already collated."""
    return batch
