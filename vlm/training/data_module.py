"""The LightningDataModule: a source combined with the fields of a task; and the loader of its training batches."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader

from vlm.checkpoint.stored import Metadata
from vlm.data.batch import Batch, DeviceImages
from vlm.data.fields import Field, ImageField, learn_tokenizers
from vlm.data.hold_out import draw_validation_indices, sample_stratified
from vlm.data.records import Source, Split, SplitSubset
from vlm.data.samples import EvalBatches, RecordDataset, SampleKey, TrainBatches, return_batch
from vlm.data.text.tokenizer import Tokenizer
from vlm.data.workers import default_workers, end_workers, ignore_signals, worker_context
from vlm.errors import Count, Injected, Range, UserError
from vlm.io.files import progress


class StepLoader(DataLoader):
    """A training loader that sets the counts of a step's loss terms before it yields the step's first batch.

    If a task has counts (`Task.counts`), all batches of a step are read before the first of them is trained on. No
    state is kept: a step ends where the trainer ends it, at a multiple of `accumulate_grad_batches` or with the epoch.

    Attributes:
        requested_at: Time of the request for the last batch, by time.perf_counter.
        waited: Seconds that training has waited for batches.
    Args:
        trainer: The trainer of the task.
        dataset, options: As in DataLoader.
    """

    def __init__(self, trainer: L.Trainer, dataset: Any, **options: Any) -> None:
        self.trainer = trainer
        self.requested_at = self.waited = 0.0
        super().__init__(dataset, **options)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        return self._measure_wait(self._by_step(super().__iter__()))  # workers start here, and not with the first batch

    def _measure_wait(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            self.requested_at = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - self.requested_at
            yield batch

    def _by_step(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        task: Any = self.trainer.lightning_module
        for first in batches:
            counts = task.counts(first)
            if counts is None:
                yield first
                continue
            done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
            accumulated = self.trainer.accumulate_grad_batches
            size = min(accumulated - done % accumulated, int(self.trainer.num_training_batches) - done)
            total = Counter(counts)
            step = [first, *islice(batches, size - 1)]
            for batch in step[1:]:
                total.update(task.counts(batch))
            task.step.counts = total
            yield from step


class Data(L.LightningDataModule):
    """Data for training and evaluation: loaders in an order that is a function of (seed, epoch).

    Without a validation split, a part of train is held out: drawn by record names, and by class if there are classes.

    Args:
        source: The data set.
        fields: Fields of each record that the task reads, by name.
        batch_size: Samples of a training step's global batch, over all devices.
        eval_batch_size: Samples of an evaluation batch, over all devices.
        num_workers: Number of processes per device that read samples; "auto" takes its share of the CPUs, at most 8 if
            there is no GPU.
        order_seed: Key of the order and of the augmentation.
        seed: Key that selects the held-out samples and those of `train_samples`; None for order_seed.
        bucket: Number of batches that are sorted by length together; 1 sorts nothing.
        batch_tokens: Approximate tokens of a training step's global batch, instead of batch_size samples; None for
            samples.
        repeats: Copies of each training sample in a batch, each augmented differently; 1 is off.
        train_samples: Number of training samples to use, the same in every epoch, with each class's share; None for
            all.
        cache_features: Whether training reads cached features of a frozen encoder instead of images.
        test: Whether the test split may be read.
        images_on_device: Whether training keeps its images on the device, and augments batches of them there.
        cache: Folder for data that runs share; None for no cache.
    Raises:
        UserError: Repeats do not divide the batch size, or there are too few samples to hold any out.
    """

    def __init__(
        self,
        *,
        source: Source,
        fields: Injected[Mapping[str, Field]],
        batch_size: Count,
        eval_batch_size: Count,
        num_workers: Annotated[int, Range(0, 1024)] | Literal["auto"],
        order_seed: Injected[int],
        seed: Annotated[int, Range(0)] | None = None,
        bucket: Count = 1,
        batch_tokens: Count | None = None,
        repeats: Count = 1,
        train_samples: Count | None = None,
        cache_features: bool = False,
        images_on_device: bool = False,
        cache: Injected[str | None] = None,
        test: Injected[bool] = True,
    ) -> None:
        super().__init__()
        if batch_size % repeats:
            raise UserError(f"data.repeats={repeats}: does not divide data.batch_size={batch_size}; give a divisor")
        self.source, self.fields, self._test = source, dict(fields), test
        self.order_seed, self.seed = order_seed, order_seed if seed is None else seed
        self.batch_size, self.eval_batch_size, self.batch_tokens = batch_size, eval_batch_size, batch_tokens
        self.bucket, self.repeats, self.cache_features = bucket, repeats, cache_features
        self.images_on_device = images_on_device
        self._read_device_images: Callable[[DeviceImages], Tensor] | None = None
        self.num_workers = default_workers() if num_workers == "auto" else int(num_workers)
        limits_views = any(field.reads_entire_split for field in self.fields.values())
        self.splits = self._open(None if limits_views else train_samples)
        self._limit = train_samples if limits_views else None
        self._samples: dict[tuple[str, bool], RecordDataset] = {}
        self._training_fields = self.fields
        self.test_split = self.final_split
        self.cache_folder = Path(cache) if cache else None
        for field in self.fields.values():
            field.open(source, self.splits, seed=order_seed, cache=self.cache_folder)

    def _open(self, train_samples: int | None) -> dict[str, Split]:
        readable = (name for name in self.source.splits if name != "test" or self._test)
        splits = {name: self.source.split(name) for name in readable}
        if "train" not in splits:
            raise UserError(f"data: has no training samples, only {' and '.join(splits)}; add training samples")
        train = splits["train"]
        if "val" not in splits:
            held = draw_validation_indices(*self._names_and_labels(train), self.seed, skipped=self.source.skipped)
            splits |= {
                "train": SplitSubset(train, sorted({*range(len(train))}.difference(held))),
                "val": SplitSubset(train, held),
            }
        if train_samples is not None:
            train = splits["train"]
            chosen: Sequence[int] = range(min(train_samples, len(train)))
            if self._stratum:
                names, labels = self._names_and_labels(train)
                chosen = sample_stratified(labels or [], names, train_samples, seed=self.seed, keep_per_class=0)
            splits["train"] = SplitSubset(train, chosen)
        return splits

    @property
    def _stratum(self) -> str | None:
        return next((field.stratum for field in self.fields.values() if field.stratum), None)

    def _names_and_labels(self, split: Split) -> tuple[list[str], list[Any] | None]:
        records = list(split.records())
        stratum = self._stratum
        return [record.id for record in records], [record[stratum] for record in records] if stratum else None

    @property
    def sizes(self) -> dict[str, int]:
        """Model sizes that the data determine, such as vocab_size."""
        return {name: size for field in self.fields.values() for name, size in field.sizes.items()}

    def learn_tokenizers(self) -> None:
        """Learns each tokenizer from the training texts of all fields that share it."""
        learn_tokenizers(self.fields.values(), self.cache_folder)

    def prepare(self) -> None:
        """Fits whatever a new run learns from the training split, such as a tokenizer."""
        self.learn_tokenizers()
        for field in self.fields.values():
            field.prepare()

    def restore(self, about: Metadata) -> None:
        """Restores from a checkpoint's metadata what `prepare` learned."""
        for field in self.fields.values():
            field.restore(about)
        self._samples.clear()

    def fingerprint(self) -> str:
        """A hash of the training split, which must be the same in a resumed run.

        It covers ids and what the fields read, without opening images; of a fresh split, the first and last sample.
        """
        split = self.samples("train", training=True).split
        digest = blake2b(f"{len(split)}".encode(), digest_size=8)
        indices = (0, len(split) - 1) if split.fresh else range(len(split))
        for record in map(split.record, indices):
            parts = [record.id, *(part for field in self.fields.values() for part in field.identity(record))]
            digest.update("\x1f".join([*parts, ""]).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def samples(self, name: str, *, training: bool = False) -> RecordDataset:
        """Returns the samples of a split as training or evaluation reads them, opened on first use."""
        if (name, training) not in self._samples:
            split, fields = self.split(name), self._training_fields if training else self.fields
            limit = self._limit if name == "train" else None
            for field in fields.values():
                split = field.view(name, split, training=training, limit=limit)
            seed, repeats = (self.order_seed, self.repeats) if training else (None, 1)
            self._samples[name, training] = RecordDataset(split, fields, seed=seed, repeats=repeats)
        return self._samples[name, training]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the task's text; None for a task without."""
        return next((field.tokenizer for field in self.fields.values() if field.tokenizer), None)

    @property
    def images(self) -> tuple[str, ImageField]:
        """Name of the image field, and the field itself.

        Raises:
            UserError: The task reads no images.
        """
        for name, field in self.fields.items():
            if isinstance(field, ImageField):
                return name, field
        raise UserError("data: the task reads no images; choose another task")

    def replace_images(self, field: Field, read: Callable[[DeviceImages], Tensor] | None = None) -> None:
        """Makes training read another field instead of images, such as features of them.

        Args:
            read: Returns the augmented pixels of a batch, for a field that gives DeviceImages.
        """
        name, _ = self.images
        self._training_fields = {**self.fields, name: field}
        self._samples.pop(("train", True), None)
        self._read_device_images = read

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if self._read_device_images is None:
            return batch
        name, _ = self.images
        images = batch[name]
        if not isinstance(images, DeviceImages):
            return batch
        return replace(batch, values={**batch.values, name: self._read_device_images(images)})

    def split(self, name: str) -> Split:
        """The split of this name.

        Raises:
            UserError: The data set has no such split.
        """
        if name not in self.splits:
            raise UserError(f"data: there is no split {name!r}; choose from {', '.join(self.splits)}")
        return self.splits[name]

    @property
    def final_split(self) -> str:
        """The split that a finished run is evaluated on: test, or val if there is no test."""
        return "test" if "test" in self.splits else "val"

    def train_batches(self) -> int:
        """Returns the number of batches per epoch and rank."""
        return len(self.train_order())

    def train_order(self) -> TrainBatches:
        """Returns the training batches as lists of sample keys."""
        samples = self.samples("train", training=True)
        return TrainBatches(
            size=len(samples),
            batch_size=self.batch_size,
            seed=self.order_seed,
            position=self._position,
            lengths=samples.lengths,
            bucket=self.bucket,
            repeats=self.repeats,
            batch_tokens=self.batch_tokens,
            **self._rank_options(),
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        kind = DataLoader if self.trainer is None else partial(StepLoader, self.trainer)
        return self.loader(self.samples("train", training=True), self.train_order(), kind)

    def eval_dataloader(self, name: str) -> DataLoader[Batch]:
        samples = self.samples(name)
        return self.loader(
            samples, EvalBatches(size=len(samples), batch_size=self.eval_batch_size, **self._rank_options())
        )

    def on_exception(self, exception: BaseException) -> None:
        end_workers()  # the trainer ends only the workers of the loop that failed

    def test_dataloader(self) -> DataLoader[Batch]:
        return self.eval_dataloader(self.test_split)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.eval_dataloader("val")

    def _rank_options(self) -> dict[str, int]:
        trainer = self.trainer
        return {"rank": trainer.global_rank, "world": trainer.world_size} if trainer else {"rank": 0, "world": 1}

    def loader(
        self,
        samples: RecordDataset,
        batches: Iterable[Sequence[SampleKey]],
        kind: Callable[..., DataLoader[Batch]] = DataLoader,
    ) -> DataLoader[Batch]:
        """Returns a loader of these batches; `kind` takes DataLoader's arguments."""
        return kind(
            samples,
            batch_sampler=batches,  # of keys, not of bare indices
            collate_fn=return_batch,
            num_workers=self.num_workers,
            worker_init_fn=ignore_signals,
            multiprocessing_context=worker_context() if self.num_workers else None,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    def read_images(
        self, images: ImageField, indices: Sequence[int], size: int, *, seed: int | None = None
    ) -> Iterator[tuple[list[int], Tensor | None, dict[int, str]]]:
        """Reads training images batch by batch, with a progress bar.

        Args:
            images: The field that reads them.
            indices: Their indices in the training split.
            size: Images of a batch.
            seed: Key of their augmentation.
        Yields:
            The indices of the images that could be read; their pixels; the reasons for the others, by index.
        """
        split = self.split("train")
        parts = [indices[at : at + size] for at in range(0, len(indices), size)]
        samples = RecordDataset(split, {"images": images}, seed=seed)
        loader = self.loader(samples, [[SampleKey(0, index) for index in part] for part in parts])
        for part, batch in zip(parts, progress(loader, len(parts), f"batches of {size} images"), strict=True):
            reasons = {sample.id: sample.reason for sample in batch.bad}
            names = {index: split.record(index).id for index in part}
            bad = {index: reasons[name] for index, name in names.items() if name in reasons}
            good = [index for index in part if index not in bad]
            yield good, batch["images"] if good else None, bad

    def _position(self) -> tuple[int, int]:
        """Returns (epoch, completed batches) from the trainer's progress counters."""
        if self.trainer is None:
            return 0, 0
        loop: Any = self.trainer.fit_loop
        return loop.epoch_progress.current.processed, loop.epoch_loop.batch_progress.current.ready
