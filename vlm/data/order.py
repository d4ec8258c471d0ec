"""The order of samples, as a pure function of (seed, epoch)."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from vlm.data.store.shard_window import Near
from vlm.randomness import numpy_rng

Key = tuple[int, int]  # (epoch, index): all that a data set needs to produce a sample


def count_batches(size: int, batch_size: int, world: int) -> int:
    """Training batches of an epoch: a last one with fewer samples than ranks would leave a rank with nothing to do."""
    full, rest = divmod(size, batch_size)
    return full + (rest >= world)


class TrainBatches:
    """Batches of sample keys in an order keyed by (seed, epoch), each rank taking its stride of the global batch.

    Every sample comes once an epoch. With lengths, samples of similar length share a batch, so that little is padding.
    No state is kept: iteration starts wherever `position` says that training stands.

    Args:
        size: Number of samples.
        batch_size: Samples of the global batch, over all ranks.
        seed: Key of the order.
        position: Returns (epoch, batches of it already done), asked when an iterator is made.
        rank, world: This process, and how many there are.
        lengths: Returns the length of every sample in an epoch.
        near: How samples lie in shards of which few are at hand at a time; None where any can be read by itself.
        bucket: How many global batches are sorted by length together; 1 sorts nothing. More is less padding, but where
            length tells kinds of samples apart, these no longer meet in a batch, and steps pull this way and that.
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
        near: Near | None = None,
    ) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.position, self.lengths = position, lengths
        self.rank, self.world, self.bucket, self.near = rank, world, bucket, near

    def __len__(self) -> int:
        return count_batches(self.size, self.batch_size, self.world)

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, done = self.position()
        for batch in self.global_batches(epoch)[done:]:
            yield [(epoch, int(index)) for index in batch[self.rank :: self.world]]

    def global_batches(self, epoch: int) -> list[np.ndarray]:
        """All global batches of an epoch."""
        rng = numpy_rng(self.seed, "order", epoch)
        order = self.order(rng)
        starts = range(0, self.size, self.batch_size)
        if self.lengths is None or self.bucket == 1:
            return [order[start : start + self.batch_size] for start in starts][: len(self)]
        lengths = np.asarray(self.lengths(epoch))
        span = self.bucket * self.batch_size
        buckets = [order[start : start + span] for start in range(0, self.size, span)]
        order = np.concatenate([bucket[np.argsort(lengths[bucket], kind="stable")] for bucket in buckets])
        batches = [order[start : start + self.batch_size] for start in starts][: len(self)]
        mixed = self.size if self.near is None else self.bucket
        return [
            batches[start + index]
            for start in range(0, len(batches), mixed)
            for index in rng.permutation(min(mixed, len(batches) - start))
        ]

    def order(self, rng: np.random.Generator) -> np.ndarray:
        """The order of samples before any are sorted by length."""
        return rng.permutation(self.size) if self.near is None else self.near.order(rng)


class EvalBatches:
    """Batches of sample keys in their own order, each sample once over all ranks, none padded or repeated."""

    def __init__(self, *, size: int, batch_size: int, rank: int = 0, world: int = 1) -> None:
        self.indices = range(rank, size, world)
        self.batch_size = max(1, batch_size // world)

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield [(0, index) for index in self.indices[start : start + self.batch_size]]
