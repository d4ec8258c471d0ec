"""Samples in shards (tars in WebDataset's layout), read in place from disk or an object store.

A sample is identified by its shard and its index in it, so that order, ranks and resuming work as for any other data
set. `shard_index` defines a shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vlm.data.images.image import ImageError, load_image
from vlm.data.store import storage
from vlm.data.store.shard_index import ShardIndex, ShardRecord


@dataclass(frozen=True)
class Opened:
    """A shard: its path, its name within ids of samples, and its index."""

    path: str
    name: str
    index: ShardIndex

    def sample(self, record: ShardRecord) -> str:
        """Id of a sample: the one of the original data set, or else SHARD/MEMBER."""
        return record.name or f"{self.name}/{record.member}"


class Samples:
    """Samples of several shards, concatenated.

    Args:
        shards: The shards.
        places: Shard and index in it of each sample.
    Shapes:
        places int64 (N, 2)
    """

    def __init__(self, shards: Sequence[Opened], places: np.ndarray) -> None:
        self.shards, self.places = shards, places
        self._stamps: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.places)

    def part(self, indices: Sequence[int]) -> "Samples":
        """A subset of the samples."""
        return Samples(self.shards, self.places[np.asarray(indices, np.int64)])

    def shard(self, index: int) -> Opened:
        """The shard of a sample."""
        return self.shards[self.places[index, 0]]

    def record(self, index: int) -> ShardRecord:
        return self.shard(index).index.record(int(self.places[index, 1]))

    def name(self, index: int) -> str:
        """Id of a sample."""
        return self.shard(index).sample(self.record(index))

    def content(self, index: int) -> bytes:
        """The bytes of an image file; raises ImageError if they cannot be read."""
        shard = self.shard(index)
        try:
            return storage.read_span(shard.path, shard.index.span(int(self.places[index, 1])))
        except (OSError, ValueError) as fault:
            raise ImageError(f"{self._path(index)}: {getattr(fault, 'strerror', None) or fault}") from fault

    def image(self, index: int) -> Image.Image:
        """The image in RGB; raises ImageError if it cannot be read."""
        return load_image(self.content(index), self._path(index))

    def stamp(self, index: int) -> str:
        """A string that changes when an image changes: the stamp of its shard and its position."""
        path = self.shard(index).path
        if path not in self._stamps:
            self._stamps[path] = storage.stamp(path)
        return f"{self._stamps[path]} {self.shard(index).index.span(int(self.places[index, 1]))}"

    def _path(self, index: int) -> str:
        return f"{self.shard(index).path}/{self.record(index).member}"
