"""The order of samples, as a pure function of (seed, epoch)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vlm.randomness import numpy_rng


@dataclass(frozen=True, slots=True)
class Key:
    """All that a data set needs to produce a sample: the copy tells apart those of an image that comes repeatedly."""

    epoch: int
    index: int
    copy: int = 0


def count_batches(size: int, batch_size: int, world: int) -> int:
    """Training batches of an epoch: a last one with fewer samples than ranks would leave a rank with nothing to do."""
    full, rest = divmod(size, batch_size)
    return full + (rest >= world)


class TrainBatches:
    """Batches of sample keys in an order keyed by (seed, epoch), each rank taking its stride of the global batch.

    Every sample comes once an epoch. With lengths, samples of similar length share a batch, so that little is padding.
    No state is kept: iteration starts wherever `position` says that training stands.

    With repeats (repeated augmentation, Hoffer et al. 2020, "Augment Your Batch") an image comes several times in a
    batch, its copies dealt to the ranks in turn. An epoch keeps its number of samples and steps, and so sees one in so
    many of the images, others in each epoch, as in DeiT and timm.

    Args:
        size: Number of samples.
        batch_size: Samples of the global batch, over all ranks.
        seed: Key of the order.
        position: Returns (epoch, batches of it already done), asked when an iterator is made.
        rank, world: This process, and how many there are.
        lengths: Returns the length of every sample in an epoch.
        bucket: How many global batches are sorted by length together; 1 sorts nothing. More is less padding, but where
            length tells kinds of samples apart, these no longer meet in a batch, and steps pull this way and that.
        repeats: How often a sample comes in a batch; divides the batch size. 1 is off.
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
    ) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.position, self.lengths = position, lengths
        self.rank, self.world, self.bucket, self.repeats = rank, world, bucket, repeats

    def __len__(self) -> int:
        return count_batches(self.size, self.batch_size, self.world)

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, done = self.position()
        for batch in self.global_batches(epoch)[done:]:
            yield self.keys(epoch, batch[self.rank :: self.world])

    def keys(self, epoch: int, places: np.ndarray) -> list[Key]:
        """The keys of samples in `global_batches`."""
        return [Key(epoch, *divmod(int(place), self.repeats)) for place in places]

    def global_batches(self, epoch: int) -> list[np.ndarray]:
        """All global batches of an epoch: place ``index * repeats + copy`` of each sample."""
        rng = numpy_rng(self.seed, "order", epoch)
        order = (rng.permutation(self.size)[:, None] * self.repeats + np.arange(self.repeats)).reshape(-1)[: self.size]
        starts = range(0, self.size, self.batch_size)
        if self.lengths is None or self.bucket == 1:
            return [order[start : start + self.batch_size] for start in starts][: len(self)]
        lengths = np.asarray(self.lengths(epoch))
        span = self.bucket * self.batch_size
        buckets = [order[start : start + span] for start in range(0, self.size, span)]
        sort = (bucket[np.argsort(lengths[bucket // self.repeats], kind="stable")] for bucket in buckets)
        order = np.concatenate(list(sort))
        batches = [order[start : start + self.batch_size] for start in starts][: len(self)]
        return [batches[index] for index in rng.permutation(len(batches))]


class EvalBatches:
    """Batches of sample keys in their own order, each sample once over all ranks, none padded or repeated."""

    def __init__(self, *, size: int, batch_size: int, rank: int = 0, world: int = 1) -> None:
        self.indices = range(rank, size, world)
        self.batch_size = max(1, batch_size // world)

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield [Key(0, index) for index in self.indices[start : start + self.batch_size]]
