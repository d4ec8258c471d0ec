"""What the data of every task have in common: splits, loaders, and where training stands."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import lightning as L
from torch.utils.data import DataLoader, Dataset

from vlm.data.features.feature_file import FeatureFile
from vlm.data.order import EvalBatches, Key, TrainBatches, count_batches
from vlm.data.store.shard_window import Foretold, Near, near_of
from vlm.data.workers import end_workers, leave_signals_to_owner, worker_context
from vlm.errors import UserError
from vlm.randomness import numpy_rng

HELD_OUT = 0.02  # share of train that validates where a data set has no validation split


class Split(Protocol):
    """Samples that can be counted; what each is, a kind of data says."""

    def __len__(self) -> int: ...


class Data(L.LightningDataModule):
    """Data for training and evaluation: loaders in an order that is a function of (seed, epoch).

    A kind of data derives from it and says what its samples are.

    Args:
        splits: The splits by name: train and val, and test where there is one.
        batch_size: Samples of a training step's global batch, over all devices.
        eval_batch_size: Samples of an evaluation batch, over all devices.
        num_workers: Processes that read samples, each device's; "auto" takes what the machine has, at most 8.
        seed: Key of the order and of the augmentation.
        cache_features: Whether training reads what a frozen encoder made of each image once, instead of the image.
    Attributes:
        features: What it then reads, once it was made.
    """

    # Names of what the task and the use of a model take from the data, as `parts` gives it.
    supplies: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        *,
        splits: Mapping[str, Split],
        batch_size: int,
        eval_batch_size: int,
        num_workers: int | str,
        seed: int,
        cache_features: bool = False,
    ) -> None:
        super().__init__()
        self.cache_features = cache_features
        self.features: FeatureFile | None = None
        self.batch_size, self.eval_batch_size, self.seed = batch_size, eval_batch_size, seed
        self.num_workers = min(8, os.cpu_count() or 1) if num_workers == "auto" else int(num_workers)
        self._splits = dict(splits)
        self._datasets: dict[tuple[str, bool], Any] = {}
        self.test_split = self.final_split

    # What a kind of data says.

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the model that the data decide, such as vocab_size."""
        raise TypeError(f"{type(self).__name__} gives no sizes")

    @property
    def parts(self) -> dict[str, Any]:
        """What the task takes from the data, by the names in `supplies`."""
        return {name: getattr(self, name) for name in self.supplies}

    @property
    def skipped(self) -> Sequence[str]:
        """What the data set left out, a line each."""
        return ()

    def prepare(self) -> None:
        """Learns from the training split what a new run needs, such as a tokenizer."""

    def restore(self, about: Mapping[str, Any]) -> None:
        """Takes from a checkpoint's description what `prepare` once learned."""

    def fingerprint(self) -> str:
        """A hash of the training split: a resumed run must go on with the same."""
        raise TypeError(f"{type(self).__name__} gives no fingerprint")

    def open_dataset(self, name: str, *, augmented: bool) -> Any:
        """The samples of a split, as training reads them if augmented, else as evaluation does."""
        raise TypeError(f"{type(self).__name__} gives no samples")

    def collate(self) -> Callable[[Any], Any]:
        """Makes a batch of what a dataset gives for the keys of a batch."""
        raise TypeError(f"{type(self).__name__} makes no batches")

    def order(self, dataset: Any) -> dict[str, Any]:
        """Further options of the order of training, as TrainBatches takes them."""
        return {}

    # What all have in common.

    def dataset(self, name: str, *, augmented: bool = False) -> Any:
        """The samples of a split, opened when they are first asked for."""
        if (name, augmented) not in self._datasets:
            self._datasets[name, augmented] = self.open_dataset(name, augmented=augmented)
        return self._datasets[name, augmented]

    def use_features(self, features: FeatureFile) -> None:
        """Lets training read features of its images in their place."""
        self.features = features
        self._datasets.pop(("train", True), None)

    def split(self, name: str) -> Any:
        """The split of this name.

        Raises:
            UserError: The data set has no such split.
        """
        if name not in self._splits:
            raise UserError(f"data: there is no split {name!r}; there are {', '.join(self._splits)}")
        return self._splits[name]

    @property
    def final_split(self) -> str:
        """The split that a finished run is judged on: test, or val where there is no test."""
        return "test" if "test" in self._splits else "val"

    def train_batches(self) -> int:
        """Batches of an epoch, on each rank."""
        size = len(self.dataset("train", augmented=True))
        return count_batches(size, self.batch_size, self._ranks()["world"])

    def train_dataloader(self) -> DataLoader[Any]:
        dataset = self.dataset("train", augmented=True)
        batches = TrainBatches(**self._order_of_all(dataset), **self.order(dataset))
        return self.loader(dataset, batches, batches.near)

    def eval_dataloader(self, name: str) -> DataLoader[Any]:
        dataset = self.dataset(name)
        batches = EvalBatches(size=len(dataset), batch_size=self.eval_batch_size, **self._ranks())
        return self.loader(dataset, batches, near_of(self.split(name)))

    def on_exception(self, exception: BaseException) -> None:
        end_workers()  # the trainer ends only those of the loop that the fault struck

    def test_dataloader(self) -> DataLoader[Any]:
        return self.eval_dataloader(self.test_split)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.eval_dataloader("val")

    def _order_of_all(self, dataset: Any) -> dict[str, Any]:
        """What the order of training is a function of, whatever the kind of data."""
        return {
            "size": len(dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "position": self._position,
            "near": near_of(self.split("train")),
            **self._ranks(),
        }

    def _ranks(self) -> dict[str, int]:
        trainer = self.trainer
        return {"rank": trainer.global_rank, "world": trainer.world_size} if trainer else {"rank": 0, "world": 1}

    def loader(
        self, dataset: Dataset, batches: Iterable[Sequence[Key]], near: Near | None = None, copies: int = 1
    ) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            # Keys are (epoch, index), not bare indices.
            batch_sampler=batches if near is None else Foretold(batches, near, copies),  # type: ignore[arg-type]
            collate_fn=self.collate(),
            num_workers=self.num_workers,
            worker_init_fn=leave_signals_to_owner,
            multiprocessing_context=worker_context() if self.num_workers else None,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    def _position(self) -> tuple[int, int]:
        """Where training stands: (epoch, batches of it done), as the trainer's own loops have it."""
        if self.trainer is None:
            return 0, 0
        loop: Any = self.trainer.fit_loop
        return loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready


def hold_out(size: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices of a training split without validation: those that go on training, and those that validate.

    Raises:
        UserError: There are too few samples.
    """
    if size < 2:
        raise UserError("data: one training sample is too few to hold one out for validation; add some")
    held = max(1, round(HELD_OUT * size))
    order = numpy_rng(seed, "held out").permutation(size).tolist()
    return sorted(order[held:]), sorted(order[:held])
