"""The cached predictions of a teacher on a training split, in a file of the cache folder."""

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlm.data.batch import Batch
from vlm.data.records import Split
from vlm.data.text.prompt_field import PromptField
from vlm.errors import UserError
from vlm.io.files import atomic_write
from vlm.nn.distillation_loss import Predictions, TopPredictions
from vlm.tasks.shared.frozen_models import (
    compute_outputs,
    describe_computation,
    find_changes,
    output_path,
    read_on_first_rank,
    write_outputs,
)
from vlm.training.step.task import Task

KEY = "task.teacher.cache"
MAX_OUTCOMES = 1024  # largest number of outcomes that are stored completely
SUFFIX = ".teacher.npz"


class PredictionCache:
    """A teacher's predictions of the training split, held in memory; missing ones are computed and stored.

    Args:
        task: The student's task.
        predict: Yields the name and the predictions of each sample of a batch.
        identity: Values that the predictions depend on besides data, device and precision; the last is top_k.
        outcomes: Number of outcomes.
    Raises:
        UserError: The inputs of training change between epochs, or the predictions cannot be written.
    """

    def __init__(
        self,
        task: Task,
        predict: Callable[[Batch], Iterator[tuple[str, Predictions]]],
        identity: tuple[str, ...],
        outcomes: int,
    ) -> None:
        assert task.data.cache_folder is not None
        if identity[-1] == "None" and outcomes > MAX_OUTCOMES:
            what = f"would store the probabilities of {outcomes:,} outcomes of each sample or token"
            raise UserError(f"{KEY}: {what}; set task.teacher.top_k=64")
        samples = task.data.samples("train", training=True)
        check_cacheable(task, samples.split)
        computation = describe_computation(task)
        self.path = output_path(task.data.cache_folder, SUFFIX, *identity, *computation, identify(task, samples.split))
        arrays = read_on_first_rank(task, lambda: read_arrays(self.path))
        if arrays is None:
            found = compute_outputs(task, samples, "train (teacher)", lambda batch: _on_host(predict(batch)))
            arrays = to_arrays(found)
            if task.trainer.is_global_zero:
                write_outputs(self.path, KEY, lambda path: _write_arrays(path, arrays))
        stops = np.cumsum(arrays["counts"])
        bounds = zip((stops - arrays["counts"]).tolist(), stops.tolist(), strict=True)
        self.bounds = dict(zip(arrays["names"].tolist(), bounds, strict=True))
        self.logprobs, self.outcomes = arrays["logprobs"], arrays.get("outcomes")

    def look_up(self, names: Sequence[str], count: int, device: torch.device) -> Predictions:
        """Returns the predictions of some samples, one after another.

        Args:
            count: Number of their tokens, or of the samples themselves.
        Raises:
            UserError: A sample was not readable or had another number of tokens when they were computed.
        """
        remedy = f"remove {self.path}, so that they are computed again"
        if missing := [name for name in names if name not in self.bounds]:
            raise UserError(f"{KEY}: {missing[0]} could not be read when predictions were stored; {remedy}", 1)
        rows = np.concatenate([np.arange(*self.bounds[name]) for name in names] or [np.arange(0)])
        if len(rows) != count:
            raise UserError(f"{KEY}: the tokens of {names[0]} or another sample have changed; {remedy}", 1)
        logprobs = torch.from_numpy(self.logprobs[rows]).to(device)
        if self.outcomes is None:
            return logprobs
        return TopPredictions(torch.from_numpy(self.outcomes[rows]).long().to(device), logprobs)


def check_cacheable(task: Task, split: Split) -> None:
    """Checks that training reads the same inputs in every epoch.

    Raises:
        UserError: It does not; the message names the option.
    """
    changes = [*find_changes(split, task.fields.get("images"))]
    changes += [f"task.{name} mixes other images in every epoch; set it to 0" for name in find_mixing(task)]
    if any(isinstance(field, PromptField) for field in task.fields.values()):
        changes.append("a row holds other conversations in every epoch")
    if not changes and any(_identity(task, split, at, 0) != _identity(task, split, at, 1) for at in range(len(split))):
        changes.append("other texts of a sample are read in every epoch; set data.source.captions_per_image=null")
    if changes:
        raise UserError(f"{KEY}: {changes[0]}, or set {KEY}=false")


def find_mixing(task: Task) -> list[str]:
    """Returns the options of a task that mix the images of a batch."""
    mixing = getattr(task, "mixing", None)
    return [] if mixing is None else [name for name in ("mixup", "cutmix") if getattr(mixing, name)]


def _identity(task: Task, split: Split, index: int, epoch: int) -> list[str]:
    record = split.record(index, epoch)
    return [record.id, *(part for field in task.fields.values() for part in field.identity(record))]


def identify(task: Task, split: Split) -> str:
    """Returns a hash of what is read of a split, with stamps of its images."""
    digest = sha256()
    for index in range(len(split)):
        record = split.record(index, 0)
        stamp = record.read_stamp() if record.read_stamp else ""
        digest.update(json.dumps([*_identity(task, split, index, 0), str(stamp)]).encode())
    return digest.hexdigest()


def _on_host(predictions: Iterator[tuple[str, Predictions]]) -> Iterator[tuple[str, list[np.ndarray]]]:
    for name, values in predictions:
        tensors = [values] if isinstance(values, Tensor) else [values.logprobs, values.outcomes.int()]
        yield name, [tensor.cpu().numpy() for tensor in tensors]


def to_arrays(found: Mapping[str, Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    """Joins predictions by name to arrays: names, counts of rows, log-probabilities and, for some outcomes, their ids.

    Raises:
        UserError: There are none.
    """
    if not found:
        raise UserError(f"{KEY}: no training sample can be read; check the data with vlm check-data", 1)
    columns = zip(*found.values(), strict=True)
    arrays = dict(zip(("logprobs", "outcomes"), map(np.concatenate, columns), strict=False))
    counts = [len(values[0]) for values in found.values()]
    return {"names": np.array(list(found)), "counts": np.array(counts, np.int64), **arrays}


def read_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """Reads stored predictions; None if there are none, or they are damaged."""
    with (
        suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile),
        np.load(path, allow_pickle=False) as file,
    ):
        arrays = {name: file[name] for name in file.files}
        if {"names", "counts", "logprobs"} <= arrays.keys() and arrays["counts"].sum() == len(arrays["logprobs"]):
            return arrays
    return None


def _write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    with atomic_write(path, sync=False) as file:
        np.savez(file, **arrays)
