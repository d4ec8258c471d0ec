"""Models that a training reads and does not change, such as a reference or a teacher, and a cache of their outputs."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from vlm.checkpoint.load import digest, load_model, locate, read
from vlm.checkpoint.stored import Checkpoint
from vlm.data.batch import Batch
from vlm.data.features import find_augment_problem
from vlm.data.fields import Field
from vlm.data.records import Split
from vlm.data.samples import EvalBatches, RecordDataset
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError
from vlm.io.files import progress
from vlm.nn.lora import is_adapter
from vlm.training.step.task import Task

Output = TypeVar("Output")


def read_frozen(place: str) -> tuple[Checkpoint, nn.Module]:
    """Reads a checkpoint, a run or a folder; returns its content and its model, in evaluation mode.

    Raises:
        UserError: It cannot be read.
    """
    loaded = read(locate(place))
    return loaded, load_model(loaded).requires_grad_(False)


def has_tokenizer(loaded: Checkpoint, tokenizer: Tokenizer) -> bool:
    """Returns True if a checkpoint has the same tokenizer."""
    stored = loaded["vlm"].get("tokenizer")
    return isinstance(stored, Mapping) and stored.get("fingerprint") == tokenizer.fingerprint


def hash_weights(model: nn.Module) -> str:
    """Returns a hash of the weights of a model without its adapters."""
    return digest({name: value for name, value in model.state_dict().items() if not is_adapter(name)})


def check_same_weights(model: nn.Module, expected: str, key: str, what: str, remedy: str) -> str:
    """Checks that a model has the weights that it had when training began; returns their hash.

    Args:
        expected: Their hash when training began; "" for any.
        key: Key of the config that names the model.
        what: The model, for the message.
        remedy: How to restore the weights.
    Raises:
        UserError: They are others.
    """
    found = hash_weights(model)
    if expected and found != expected:
        raise UserError(f"{key}: {what} has other weights than when training began; restore {remedy}")
    return found


def output_path(folder: Path, suffix: str, *identity: str) -> Path:
    """Returns the path of cached outputs. Its name is a hash of everything that they depend on.

    Changed data or another model therefore have another file.

    Args:
        folder: The cache.
        suffix: End of the name.
        identity: Values that the outputs depend on, as text.
    """
    name = sha256("\0".join(identity).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return folder / f"{name}{suffix}"


def write_outputs(path: Path, key: str, write: Callable[[Path], None]) -> None:
    """Writes cached outputs.

    Args:
        key: Key of the config that caches them.
    Raises:
        UserError: They cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as fault:
        remedy = f"free some space, or set {key}=false"
        raise UserError(f"{path}: cannot be written ({fault.strerror}); {remedy}", 1) from fault


def describe_computation(task: Task) -> tuple[str, str]:
    """Returns what outputs depend on besides model and data: the states of the fields, the device and the precision."""
    states = json.dumps({name: field.state() for name, field in task.fields.items()}, sort_keys=True, default=repr)
    return states, f"{task.device.type} {task.trainer.precision}"


def read_on_first_rank(task: Task, read: Callable[[], Output | None]) -> Output | None:
    """Returns what the first rank reads, on all ranks: the others may see another file, or none."""
    found: list[Any] = [read() if task.trainer.is_global_zero else None]
    if task.trainer.world_size > 1:
        torch.distributed.broadcast_object_list(found)
    return found[0]


def compute_outputs(
    task: Task, samples: RecordDataset, what: str, compute: Callable[[Batch], Iterable[tuple[str, Output]]]
) -> dict[str, Output]:
    """Computes outputs of all samples of a data set, shared by the ranks; each rank gets those of all.

    Args:
        task: The task; its trainer has the precision.
        samples: The samples.
        what: Name of the outputs, for the progress display.
        compute: Returns the outputs of a batch on the task's device, by name.
    """
    data, ranks = task.data, task.trainer.world_size
    order = EvalBatches(size=len(samples), batch_size=data.eval_batch_size, rank=task.global_rank, world=ranks)
    outputs: dict[str, Output] = {}
    with torch.inference_mode(), task.trainer.precision_plugin.forward_context():
        for batch in progress(data.loader(samples, order), len(order), f"batches of {what}"):
            outputs |= dict(compute(data.on_after_batch_transfer(batch.to(task.device), 0)))
    if ranks > 1:
        gathered: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(gathered, outputs)
        outputs = {name: values for part in gathered for name, values in part.items()}
    return outputs


def find_changes(split: Split, images: Field | None) -> Iterator[str]:
    """Yields a line for each reason why the images or records of a training split change between epochs.

    Args:
        images: The field of its images.
    """
    if split.fresh:
        yield "other samples are read in every epoch; use other data, or fix them with data.train_samples=N"
    if problem := find_augment_problem(getattr(images, "augment", None)):
        yield problem
