"""Base of sources with generated samples."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from vlm.data.records import NAMES, Record, Source, Split
from vlm.data.shapes.scenes import Scene, draw


class Keys(NamedTuple):
    """Everything that determines a sample; epoch is 0 if all epochs have the same samples."""

    seed: int
    split: str
    epoch: int
    place: int  # index in the split

    @property
    def id(self) -> str:
        return f"{self.split}-{self.epoch}-{self.place:06d}"

    def record(self, known: Mapping[str, Any], scene: Scene | None = None) -> Record:
        """The record of a sample, with the image of its scene if it has one."""
        if scene is None:
            return Record(self.id, known)
        return Record(self.id, known, partial(draw, scene), read_stamp=lambda: str(scene))


class DrawnSource(Source):
    """A source with three splits; ``train`` has fresh samples every epoch, ``val`` and ``test`` are fixed.

    A subclass defines `sample`.

    Args:
        seed: Seed of all samples.
        lengths: Number of samples per split (and epoch).
    """

    splits = NAMES
    drawn = True

    def __init__(self, seed: int, lengths: Mapping[str, int]) -> None:
        self.seed, self.lengths = seed, lengths

    def open(self, name: str) -> "DrawnSplit":
        return DrawnSplit(self, name)

    def sample(self, keys: Keys) -> Record:
        """Generates a sample."""
        raise TypeError(f"{type(self).__name__} draws no sample")


class DrawnSplit(Split):
    """A split whose samples are generated on demand."""

    def __init__(self, source: DrawnSource, name: str) -> None:
        self.source, self.name, self.fresh = source, name, name == "train"

    def __len__(self) -> int:
        return self.source.lengths[self.name]

    def keys(self, index: int, epoch: int = 0) -> Keys:
        """The keys of a sample."""
        return Keys(self.source.seed, self.name, epoch if self.fresh else 0, index)

    def record(self, index: int, epoch: int = 0) -> Record:
        return self.source.sample(self.keys(index, epoch))
