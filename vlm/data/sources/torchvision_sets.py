"""CIFAR-10, FashionMNIST and MNIST as torchvision reads and downloads them."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vlm.errors import UserError


class _Files(NamedTuple):
    """Where a set's files lie within the root, what they are called, and who gives them."""

    folder: str
    names: str
    home: str


_IDX = "{train,t10k}-images-idx3-ubyte.gz and {train,t10k}-labels-idx1-ubyte.gz"
SETS = {
    "CIFAR10": _Files("", "cifar-10-python.tar.gz", "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "FashionMNIST": _Files("FashionMNIST/raw", _IDX, "https://github.com/zalandoresearch/fashion-mnist"),
    "MNIST": _Files("MNIST/raw", _IDX, "https://github.com/cvdf-datasets/mnist"),
}


class TorchvisionSplit:
    """One split, the same in every epoch; all of it is in memory.

    Args:
        name: Name of the split.
        pixels: The images, grey or RGB.
        labels: The class of each.
    Shapes:
        pixels uint8 (B, H, W) or (B, H, W, 3), labels (B,)
    """

    fresh = False

    def __init__(self, *, name: str, pixels: np.ndarray, labels: Sequence[int]) -> None:
        self.name, self.pixels, self.labels = name, pixels, labels

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, epoch: int, index: int) -> Image.Image:
        return Image.fromarray(self.pixels[index]).convert("RGB")

    def signature(self, index: int) -> str:
        return blake2b(self.pixels[index].tobytes(), digest_size=8).hexdigest()

    def label(self, epoch: int, index: int) -> int:
        return self.labels[index]

    def sample_id(self, epoch: int, index: int) -> str:
        """The split and the place in the set's own order, which never changes."""
        return f"{self.name}/{index:05d}"


class TorchvisionSet:
    """A data set of `torchvision.datasets`, downloaded where it is not there yet.

    Args:
        name: A name in `SETS`.
        root: Folder of the files, as torchvision lays them out.
        download: Whether to download what is not there.
    Raises:
        UserError: If the name is unknown, or the files are neither there nor to be had.
    """

    splits: tuple[str, ...] = ("train", "test")
    skipped: Sequence[str] = ()

    def __init__(self, *, name: str, root: str, download: bool = False) -> None:
        if name not in SETS:
            raise UserError(f"data.source.name={name!r} is unknown; choose one of {', '.join(SETS)}")
        self.name = name
        self._splits = {}
        for split in self.splits:
            found = _load(name, root, split == "train", download)
            pixels, labels = np.asarray(found.data), np.asarray(found.targets).tolist()
            self._splits[split] = TorchvisionSplit(name=split, pixels=pixels, labels=labels)
            self.classes: list[str] = list(found.classes)

    def split(self, name: str) -> TorchvisionSplit:
        """The split of this name.

        Raises:
            UserError: If there is no such split.
        """
        if name not in self.splits:
            raise UserError(f"{self.name} has no split {name!r}; it has {', '.join(self.splits)}")
        return self._splits[name]


def _load(name: str, root: str, train: bool, download: bool) -> Any:
    """Torchvision's object of a split; it compares what it downloads and what it unpickles with known hashes."""
    from torchvision import datasets  # takes a second to import, so only where it is used

    made = getattr(datasets, name)
    try:
        return made(root, train=train, download=False)
    except (RuntimeError, OSError, ValueError) as fault:
        reason: Exception = fault
    if download:
        try:
            return made(root, train=train, download=True)
        except (RuntimeError, OSError, ValueError) as fault:  # no network, a wrong hash, a full disk
            reason = fault
    files = SETS[name]
    raise UserError(
        f"{root}: {name} is not there, {'and could not be downloaded' if download else 'and download is off'} "
        f"({' '.join(str(reason).split())[:100]})\n"
        f"put {files.names} (from {files.home}) into {Path(root) / files.folder}, where data.source.download=true "
        "unpacks what is there, or set data.root to where they are"
    ) from reason
