"""What a data set of images in classes gives, and drawing samples of it so that each class keeps its share."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from PIL import Image

from vlm.data.features.fingerprint import signature_of
from vlm.randomness import key


class ClassSplit(Protocol):
    """One split of a source of images in classes. A fresh split has other samples in every epoch."""

    fresh: bool

    def __len__(self) -> int: ...
    def image(self, epoch: int, index: int) -> Image.Image: ...
    def label(self, epoch: int, index: int) -> int: ...
    def sample_id(self, epoch: int, index: int) -> str: ...


class ClassSource(Protocol):
    """A data set of images in classes; a label is a place in `classes`."""

    splits: tuple[str, ...]
    classes: list[str]
    skipped: Sequence[str]  # what was left out, a line each

    def split(self, name: str) -> ClassSplit: ...


class ClassPart:
    """Some samples of a split, by index, the same ones in every epoch; itself a split."""

    fresh = False

    def __init__(self, split: ClassSplit, indices: Sequence[int]) -> None:
        self.split, self.indices = split, indices

    def __len__(self) -> int:
        return len(self.indices)

    def image(self, epoch: int, index: int) -> Image.Image:
        return self.split.image(0, self.indices[index])

    def label(self, epoch: int, index: int) -> int:
        return self.split.label(0, self.indices[index])

    def sample_id(self, epoch: int, index: int) -> str:
        return self.split.sample_id(0, self.indices[index])

    def signature(self, index: int) -> str | None:
        return signature_of(self.split, self.indices[index])


def labels_of(split: ClassSplit) -> list[int]:
    """The label of each sample of a split in its first epoch."""
    return [split.label(0, index) for index in range(len(split))]


def names_of(split: ClassSplit) -> list[str]:
    """The name of each sample of a split in its first epoch."""
    return [split.sample_id(0, index) for index in range(len(split))]


def stratified(labels: Sequence[int], names: Sequence[str], count: int, *, seed: int, leave: int = 1) -> list[int]:
    """Indices of so many samples, each class having its share of them to within one.

    A class's samples are ranked by a hash of their names, so that most stay where they are when others are added.

    Args:
        labels: The class of each sample.
        names: What tells each sample from all others.
        count: How many to take; fewer are taken where `leave` forbids more.
        seed: Chooses which.
        leave: How many samples of each class are never taken, so that no class goes without.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(labels):
        members[label].append(index)
    sizes = {label: len(members[label]) for label in sorted(members)}
    taken: list[int] = []
    for label, quota in _quotas(sizes, count, seed=seed, leave=leave).items():
        taken += sorted(members[label], key=lambda index: key("stratified", seed, names[index]))[:quota]
    return sorted(taken)


def _quotas(sizes: dict[int, int], count: int, *, seed: int, leave: int) -> dict[int, int]:
    """How many of each class, by the largest remainder; the seed decides among equal ones."""
    total = sum(sizes.values())
    count = min(count, total)
    quotas = {label: min(count * size // total, max(0, size - leave)) for label, size in sizes.items()}
    wanting = count - sum(quotas.values())
    remainders = {label: count * size % total for label, size in sizes.items()}
    for label in sorted(sizes, key=lambda label: (-remainders[label], key("quota", seed, label))):
        if wanting > 0 and remainders[label] and quotas[label] < sizes[label] - leave:
            quotas[label] += 1
            wanting -= 1
    return quotas
