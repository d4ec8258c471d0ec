"""Reading shards that come whole and of which few are at hand at a time: samples near to each other come together."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np


class Near:
    """Which shard each sample of a split is in, for an order of reading that needs few of them at a time.

    Args:
        shards: The shard of each sample, a number.
        window: How many shards are mixed.
        fetch: Takes the number of a shard that will be read soon, and returns at once.
    Shapes:
        shards int64 (N,)
    """

    def __init__(self, shards: np.ndarray, *, window: int, fetch: Callable[[int], None]) -> None:
        self.shards, self.window, self.fetch = shards, window, fetch
        self.count = len(np.unique(shards))

    def part(self, indices: Sequence[int]) -> "Near":
        """That of some samples."""
        return Near(self.shards[np.asarray(indices, np.int64)], window=self.window, fetch=self.fetch)

    def order(self, rng: np.random.Generator) -> np.ndarray:
        """A random order: a window moves over the shards, themselves in a random order, and mixes those in it.

        It comes around to where it began, so that it is full at the begin and the end of an epoch too, for which the
        shards in it then are needed twice; one as wide as all shards makes any order as likely as any other.

        Shapes:
            -> int64 (N,)
        """
        turns = rng.permutation(self.count)[np.unique(self.shards, return_inverse=True)[1]]  # (N,)
        drawn = rng.random(len(turns))  # (N,)
        return np.argsort((turns + min(self.window, self.count) * drawn) % self.count, kind="stable")

    def ahead(self, indices: Iterable[int]) -> None:
        """Has the shards fetched that hold these samples."""
        for shard in np.unique(self.shards[np.fromiter(indices, np.int64)]).tolist():
            self.fetch(shard)


class Foretold:
    """Batches whose shards are fetched while those before them are read, as many as a shard is good for.

    Args:
        batches: Batches of keys.
        near: Whose samples they are.
        copies: How many indices in a row mean the same sample.
    """

    def __init__(self, batches: Any, near: Near, copies: int = 1) -> None:
        self.batches, self.near, self.copies = batches, near, copies

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        waiting: deque[list[tuple[int, int]]] = deque()
        for batch in self.batches:
            self.near.ahead(index // self.copies for _, index in batch)
            waiting.append(batch)
            if len(waiting) > len(self) // self.near.count:
                yield waiting.popleft()
        yield from waiting


def near_of(split: Any) -> Near | None:
    """How the samples of a split lie in shards that come whole; None where any sample can be read by itself."""
    if hasattr(split, "indices"):  # a part of a split
        near = near_of(split.split)
        return near and near.part(split.indices)
    return split.samples.near if hasattr(split, "samples") else None
