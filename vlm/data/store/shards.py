"""Samples in shards: tars in WebDataset's layout, on disk or in an object store, read where they lie.

A sample is known by its shard and its place in it, so that the order of samples, ranks and resuming are those of any
other data set. `shard_index` defines a shard.
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
    """A shard: its path, its name in those of its samples, and its index."""

    path: str
    name: str
    index: ShardIndex

    def sample(self, record: ShardRecord) -> str:
        """Name of a sample: the one that it had where the shard was written from, or else SHARD/MEMBER."""
        return record.name or f"{self.name}/{record.member}"


class Samples:
    """Samples of several shards, one after another.

    Args:
        shards: The shards.
        places: Shard and place in it of each sample.
    Shapes:
        places int64 (N, 2)
    """

    def __init__(self, shards: Sequence[Opened], places: np.ndarray) -> None:
        self.shards, self.places = shards, places
        self._stamps: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self.places)

    def part(self, indices: Sequence[int]) -> "Samples":
        """Some of them."""
        return Samples(self.shards, self.places[np.asarray(indices, np.int64)])

    def shard(self, index: int) -> Opened:
        """The shard that a sample is in."""
        return self.shards[self.places[index, 0]]

    def record(self, index: int) -> ShardRecord:
        return self.shard(index).index.record(int(self.places[index, 1]))

    def name(self, index: int) -> str:
        """Name of a sample."""
        return self.shard(index).sample(self.record(index))

    def content(self, index: int) -> bytes:
        """The bytes of an image's file; an ImageError is raised where they cannot be read."""
        shard = self.shard(index)
        try:
            return storage.read_span(shard.path, shard.index.span(int(self.places[index, 1])))
        except (OSError, ValueError) as fault:
            raise ImageError(f"{self._path(index)}: {getattr(fault, 'strerror', None) or fault}") from fault

    def image(self, index: int) -> Image.Image:
        """The image in RGB; an ImageError is raised for one that cannot be read."""
        return load_image(self.content(index), self._path(index))

    def stamp(self, index: int) -> str:
        """A text that changes where an image does: when its shard was written, and where in it the image lies."""
        path = self.shard(index).path
        if path not in self._stamps:
            self._stamps[path] = storage.stamp(path)
        return f"{self._stamps[path]} {self.shard(index).index.span(int(self.places[index, 1]))}"

    def _path(self, index: int) -> str:
        return f"{self.shard(index).path}/{self.record(index).member}"
