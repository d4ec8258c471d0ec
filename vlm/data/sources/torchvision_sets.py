"""CIFAR-10, FashionMNIST and MNIST, read and downloaded by torchvision."""

from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from vlm.data.records import ListSplit, Record, Source, Split
from vlm.errors import UserError


class _Files(NamedTuple):
    """Files of a data set: folder in the root, file names, and web page."""

    folder: str
    names: str
    home: str


_IDX = "{train,t10k}-images-idx3-ubyte.gz and {train,t10k}-labels-idx1-ubyte.gz"
SETS = {
    "CIFAR10": _Files("", "cifar-10-python.tar.gz", "https://www.cs.toronto.edu/~kriz/cifar.html"),
    "FashionMNIST": _Files("FashionMNIST/raw", _IDX, "https://github.com/zalandoresearch/fashion-mnist"),
    "MNIST": _Files("MNIST/raw", _IDX, "https://github.com/cvdf-datasets/mnist"),
}


class TorchvisionSet(Source):
    """A data set of `torchvision.datasets`, downloaded if it is missing.

    Args:
        name: A name in `SETS`.
        root: Folder of the files, in torchvision's layout.
        download: Whether to download missing files.
    Raises:
        UserError: The name is unknown, or the files are missing and cannot be downloaded.
    """

    holds = ("image", "label")
    splits = ("train", "test")

    def __init__(self, *, name: str, root: str, download: bool = False) -> None:
        if name not in SETS:
            raise UserError(f"data.source.name={name!r} is unknown; choose one of {', '.join(SETS)}")
        self.name = name
        loaded = {split: _load(name, root, split == "train", download) for split in self.splits}
        self.classes = list(loaded["train"].classes)
        self._pixels = {split: np.asarray(data.data) for split, data in loaded.items()}  # (B, H, W) or (B, H, W, 3)
        self._labels = {split: np.asarray(data.targets).tolist() for split, data in loaded.items()}

    def open(self, name: str) -> Split:
        return ListSplit(range(len(self._labels[name])), partial(self._record, name))

    def _record(self, split: str, index: int, epoch: int) -> Record:
        """An image by its index in the data set's own order."""
        pixels, label = self._pixels[split][index], self._labels[split][index]
        return Record(
            f"{split}/{index:05d}",
            {"label": label, "class": self.classes[label]},
            lambda: Image.fromarray(pixels).convert("RGB"),
            None,
            lambda: blake2b(pixels.tobytes(), digest_size=8).hexdigest(),
        )


def _load(name: str, root: str, train: bool, download: bool) -> Any:
    """torchvision's data set of a split; it verifies hashes of the files that it downloads and unpickles."""
    from torchvision import datasets  # takes a second to import

    kind = getattr(datasets, name)
    try:
        return kind(root, train=train, download=False)
    except (RuntimeError, OSError, ValueError) as fault:
        reason: Exception = fault
    if download:
        try:
            return kind(root, train=train, download=True)
        except (RuntimeError, OSError, ValueError) as fault:  # no network, a wrong hash, a full disk
            reason = fault
    files = SETS[name]
    raise UserError(
        f"{root}: {name} is missing, {'and could not be downloaded' if download else 'and download is off'} "
        f"({' '.join(str(reason).split())[:100]})\n"
        f"put {files.names} (from {files.home}) into {Path(root) / files.folder} and set data.source.download=true to "
        "unpack them, or set data.root to their folder"
    ) from reason
