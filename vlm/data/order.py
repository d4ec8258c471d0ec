"""The order of samples, as a pure function of (seed, epoch)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vlm.errors import UserError
from vlm.randomness import numpy_rng


@dataclass(frozen=True, slots=True)
class Key:
    """All that a data set needs to produce a sample: the copy tells apart those of an image that comes repeatedly."""

    epoch: int
    index: int
    copy: int = 0


class TrainBatches:
    """Batches of sample keys in an order keyed by (seed, epoch), each rank taking its stride of the global batch.

    Every sample comes once an epoch. With lengths, samples of similar length share a batch, so that little is padding.
    No state is kept: iteration starts wherever `position` says that training stands.

    With repeats (repeated augmentation, Hoffer et al. 2020, "Augment Your Batch") an image comes several times in a
    batch, its copies dealt to the ranks in turn. An epoch keeps its number of samples and steps, and so sees one in so
    many of the images, others in each epoch, as in DeiT and timm.

    With batch_tokens, batches hold about so many tokens in place of so many samples. Their number is that of the first
    epoch in all epochs, so that schedules and positions stay what they are.

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
        batch_tokens: Tokens of the global batch, about, in place of batch_size samples; None for batch_size samples.
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
        """Batches of an epoch; none with fewer samples than ranks, which would leave a rank with nothing to do."""
        if self.batch_tokens is not None and self.lengths is not None:
            tokens = sum(self.lengths(0))
            if not tokens:
                raise UserError("data.batch_tokens: samples of this task have no length; leave it out for batch_size")
            return min(max(1, round(tokens / self.batch_tokens)), self.size // self.world)
        full, rest = divmod(self.size, self.batch_size)
        return full + (rest >= self.world)

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
        if self.lengths is None or (self.bucket == 1 and self.batch_tokens is None):
            return self._equal(order)
        lengths = np.asarray(self.lengths(epoch))[order // self.repeats]
        mean = self.batch_size if self.batch_tokens is None else -(-self.size // max(1, len(self)))
        span = self.bucket * mean
        sort = [start + np.argsort(lengths[start : start + span], kind="stable") for start in range(0, self.size, span)]
        if self.batch_tokens is None:
            batches = self._equal(order[np.concatenate(sort)])
        else:
            sort[1::2] = [part[::-1] for part in sort[1::2]]  # a batch over the end of a bucket is of one length too
            places = np.concatenate(sort)
            batches = np.split(order[places], even_cuts(lengths[places], len(self), least=self.world))[: len(self)]
        return [batches[index] for index in rng.permutation(len(batches))]

    def _equal(self, order: np.ndarray) -> list[np.ndarray]:
        """Batches of batch_size samples; a rest of fewer than ranks joins the last."""
        return np.split(order, [self.batch_size * number for number in range(1, len(self))]) if len(self) else []


def even_cuts(sizes: np.ndarray, parts: int, *, least: int) -> np.ndarray:
    """Places that cut a sequence into parts of about the same sum.

    Args:
        least: Fewest members of a part.
    """
    ends = np.cumsum(sizes)
    number = np.arange(1, parts)
    cuts = np.searchsorted(ends, ends[-1] * number / parts) + 1
    beyond = np.maximum.accumulate(np.maximum(cuts - least * number, 0))  # grows: each is so far from the one before
    return np.minimum(beyond + least * number, len(sizes) - least * (parts - number))


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
