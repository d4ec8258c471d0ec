"""Repeated augmentation (Hoffer et al. 2020, "Augment Your Batch"): an image several times in a batch."""

from typing import Any

import numpy as np
from torch.utils.data import Dataset

from vlm.data.order import Key, TrainBatches
from vlm.randomness import numpy_rng


class RepeatedBatches(TrainBatches):
    """Batches in which each image comes several times, its copies dealt to the ranks in turn.

    An epoch has as many samples and steps as without, and so sees only one in so many of the images, others in each
    epoch, as in DeiT and timm. Indices count the copies: copy r of image i is ``i * repeats + r``.

    Args:
        repeats: How often an image comes; divides the batch size, so that no batch parts the copies of an image.
        given: As in TrainBatches.
    """

    def __init__(self, *, repeats: int, **given: Any) -> None:
        super().__init__(**given)
        self.repeats = repeats

    def global_batches(self, epoch: int) -> list[np.ndarray]:
        order = self.order(numpy_rng(self.seed, "order", epoch))
        copies = (order[:, None] * self.repeats + np.arange(self.repeats)).reshape(-1)[: self.size]
        starts = range(0, self.size, self.batch_size)
        return [copies[start : start + self.batch_size] for start in starts][: len(self)]


class Repeated(Dataset):
    """The samples of a dataset by the indices of `RepeatedBatches`, each copy augmented in its own way.

    Args:
        dataset: Has ``sample(epoch, index, *more)``, which adds what more it is given to the augmentation's key.
        repeats: How often an image comes.
    """

    def __init__(self, dataset: Any, repeats: int) -> None:
        self.dataset, self.repeats = dataset, repeats

    def __len__(self) -> int:
        return len(self.dataset) * self.repeats

    def __getitem__(self, at: Key) -> Any:
        epoch, copy = at
        return self.dataset.sample(epoch, *divmod(copy, self.repeats))
