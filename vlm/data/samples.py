"""Data set of batches of a task's fields, in an order that is a function of (seed, epoch)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from vlm.data.batch import BadSample, Batch
from vlm.data.fields import Field
from vlm.data.images.image import ImageError
from vlm.data.records import Split
from vlm.errors import UserError
from vlm.randomness import numpy_rng


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Identifies a sample in an epoch; `copy` distinguishes repetitions of the same image."""

    epoch: int
    index: int
    copy: int = 0


class TrainBatches:
    """Batches of sample keys in an order determined by (seed, epoch); each rank takes its stride of the global batch.

    Every sample occurs once per epoch. With lengths, samples of similar length share a batch, to reduce padding. The
    class has no state: iteration starts at `position`.

    With repeats (repeated augmentation, Hoffer et al. 2020, "Augment Your Batch") an image occurs several times in a
    batch, its copies dealt to the ranks in turn. An epoch keeps its number of samples and steps, so it contains only a
    fraction of the images, others in each epoch, as in DeiT and timm.

    With batch_tokens, batches hold about that many tokens instead of a fixed number of samples. The number of batches
    is that of the first epoch in all epochs, so that schedules and positions stay valid.

    Args:
        size: Number of samples.
        batch_size: Number of samples of the global batch, over all ranks.
        seed: Seed of the order.
        position: Returns (epoch, number of its batches already done); called when an iterator is created.
        rank, world: Rank of this process, and number of processes.
        lengths: Returns the length of every sample in an epoch.
        bucket: Number of global batches that are sorted by length together; 1 disables sorting. More gives less
            padding, but if length correlates with the kind of sample, kinds no longer mix in a batch and gradients
            oscillate.
        repeats: Number of times a sample occurs in a batch; must divide the batch size. 1 is off.
        batch_tokens: Approximate number of tokens of the global batch, instead of batch_size samples; None disables it.
    """

    def __init__(
        self,
        *,
        size: int,
        batch_size: int,
        seed: int,
        position: Callable[[], tuple[int, int]],
        rank: int = 0,
        world: int = 1,
        lengths: Callable[[int], Sequence[int]] | None = None,
        bucket: int = 32,
        repeats: int = 1,
        batch_tokens: int | None = None,
    ) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.position, self.lengths, self.batch_tokens = position, lengths, batch_tokens
        self.rank, self.world, self.bucket, self.repeats = rank, world, bucket, repeats

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _count(self) -> int:
        """Number of batches per epoch; 0 if there are fewer samples than ranks."""
        if self.batch_tokens is not None and self.lengths is not None:
            tokens = sum(self.lengths(0))
            if not tokens:
                raise UserError("data.batch_tokens: samples of this task have no length; unset it and use batch_size")
            return min(max(1, round(tokens / self.batch_tokens)), self.size // self.world)
        full, remainder = divmod(self.size, self.batch_size)
        return full + (remainder >= self.world)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        epoch, done = self.position()
        for batch in self.global_batches(epoch)[done:]:
            yield self.keys(epoch, batch[self.rank :: self.world])

    def keys(self, epoch: int, numbers: np.ndarray) -> list[SampleKey]:
        """Converts samples of `global_batches` to keys."""
        return [SampleKey(epoch, *divmod(int(number), self.repeats)) for number in numbers]

    def global_batches(self, epoch: int) -> list[np.ndarray]:
        """All global batches of an epoch: ``index * repeats + copy`` of each sample."""
        rng = numpy_rng(self.seed, "order", epoch)
        order = (rng.permutation(self.size)[:, None] * self.repeats + np.arange(self.repeats)).reshape(-1)[: self.size]
        if self.lengths is None or (self.bucket == 1 and self.batch_tokens is None):
            return self._split_evenly(order)
        lengths = np.asarray(self.lengths(epoch))[order // self.repeats]
        mean = self.batch_size if self.batch_tokens is None else -(-self.size // max(1, len(self)))
        span = self.bucket * mean
        sort = [start + np.argsort(lengths[start : start + span], kind="stable") for start in range(0, self.size, span)]
        if self.batch_tokens is None:
            batches = self._split_evenly(order[np.concatenate(sort)])
        else:
            sort[1::2] = [part[::-1] for part in sort[1::2]]  # batches that span two buckets have similar lengths too
            by_length = np.concatenate(sort)
            # Batches of about equally many tokens, none with fewer samples than ranks.
            ends, before = np.cumsum(lengths[by_length]), np.arange(1, len(self))  # before: batches before each cut
            cuts = np.searchsorted(ends, ends[-1] * before / len(self)) + 1
            beyond = np.maximum.accumulate(np.maximum(cuts - self.world * before, 0))
            cuts = np.minimum(beyond + self.world * before, self.size - self.world * (len(self) - before))
            batches = np.split(order[by_length], cuts)[: len(self)]
        return [batches[index] for index in rng.permutation(len(batches))]

    def _split_evenly(self, order: np.ndarray) -> list[np.ndarray]:
        """Batches of batch_size samples; a remainder smaller than the number of ranks joins the last batch."""
        return np.split(order, [self.batch_size * number for number in range(1, len(self))]) if len(self) else []


class EvalBatches:
    """Batches of sample keys in their original order; each sample occurs once over all ranks, without padding."""

    def __init__(self, *, size: int, batch_size: int, rank: int = 0, world: int = 1) -> None:
        self.indices = range(rank, size, world)
        self.batch_size = max(1, batch_size // world)

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield [SampleKey(0, index) for index in self.indices[start : start + self.batch_size]]


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

    def __getitems__(self, keys: Sequence[SampleKey]) -> Batch:
        ids: list[str] = []
        rows: list[dict[str, Any]] = []
        bad: list[BadSample] = []
        for key in keys:
            record = self.split.record(key.index, key.epoch)
            copy = (key.copy,) if self.repeats > 1 else ()
            augment_key = None if self.seed is None else (self.seed, key.epoch, key.index, *copy)
            try:
                rows.append({name: field.encode(record, augment_key) for name, field in self.fields.items()})
                ids.append(record.id)
            except ImageError as fault:
                bad.append(BadSample(record.id, str(fault)))
        values = {name: field.collate([row[name] for row in rows]) for name, field in self.fields.items()}
        return Batch(ids, values, bad)

    def lengths(self, epoch: int) -> list[int]:
        """Length of each sample in an epoch, summed over fields."""
        epoch = epoch if self.split.fresh else 0
        if self._lengths is None or self._lengths[0] != epoch:
            records = (self.split.record(index, epoch) for index in range(len(self)))
            fields = self.fields.values()
            self._lengths = epoch, [sum(field.length(record) for field in fields) for record in records]
        return self._lengths[1]


def return_batch(batch: Any) -> Any:
    """Returns the batch as it is: `RecordDataset` has collated it."""
    return batch
