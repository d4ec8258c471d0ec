"""The reference model of preference training: the model before training or another checkpoint; cached scores of it."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn

from vlm.data.batch import AnswerPairs
from vlm.data.fields import Field
from vlm.data.records import Split
from vlm.data.text.preference_field import name_pairs
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError
from vlm.io.files import write_text
from vlm.nn.lora import B, is_adapter
from vlm.tasks.shared.frozen_models import (
    check_same_weights,
    find_changes,
    has_tokenizer,
    hash_weights,
    output_path,
    read_frozen,
    write_outputs,
)

CACHE_KEY = "task.cache_reference"

Start = Callable[[], nn.Module]  # builds the model with the weights from which training started


class ReferenceModel:
    """A frozen model in evaluation mode, built on first use. It shares the parameters that training does not change.

    With adapters whose base is frozen, it is the trained model without them and needs no memory for weights of its own.

    Args:
        policy: The trained model.
        place: Checkpoint or folder of the reference; None for the weights from which training started.
        tokenizer: The tokenizer of the policy.
    Attributes:
        expected: Hash of the weights that it must have; "" for any.
    """

    def __init__(self, policy: nn.Module, place: str | None, tokenizer: Callable[[], Tokenizer]) -> None:
        self.policy, self.place, self._tokenizer = policy, place, tokenizer
        self.start: Start | None = None
        self.expected = ""
        self._model: nn.Module | None = None

    def model(self) -> nn.Module:
        """Returns the model, on the device of the policy.

        Raises:
            UserError: Its checkpoint cannot be read or has another model, or its weights changed since training began.
        """
        if self._model is None:
            if self.place is not None:
                self._model = _read_reference(self.place, self.policy, self._tokenizer())
            elif self.start is None or _trains_only_adapters(self.policy):
                self._model = _copy_without_adapters(self.policy)
            else:
                self._model = self.start()
            _share_frozen_parameters(self._model, self.policy)
            origin = self.place or "those of model.init_from"
            check_same_weights(self._model, self.expected, "task.reference", "the reference model", origin)
            self._model.requires_grad_(False).eval()
        return self._model.to(next(self.policy.parameters()).device)

    def hash(self) -> str:
        """Returns a hash of its weights."""
        return hash_weights(self.model())

    def release(self) -> None:
        """Frees its memory; `model` builds it again."""
        if self.place is not None or self.start is not None:
            self._model = None


def _trains_only_adapters(model: nn.Module) -> bool:
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return bool(trained) and all(map(is_adapter, trained))


def _copy_without_adapters(model: nn.Module) -> nn.Module:
    """Copies a model, sharing its frozen parameters, with adapters that add zero."""
    shared = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    copy = deepcopy(model, shared)
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            if is_adapter(name) and name.endswith(B):
                parameter.zero_()
    return copy


def _share_frozen_parameters(reference: nn.Module, policy: nn.Module) -> None:
    """Replaces parameters of the reference by those of the policy that are frozen and equal."""
    frozen = {name: parameter for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    for name, parameter in [*reference.named_parameters()]:
        shared = frozen.get(name)
        if shared is not None and shared is not parameter and torch.equal(shared.cpu(), parameter.cpu()):
            module, _, attribute = name.rpartition(".")
            setattr(reference.get_submodule(module), attribute, shared)


def _read_reference(place: str, policy: nn.Module, tokenizer: Tokenizer) -> nn.Module:
    """Loads the model of a checkpoint or a folder.

    Raises:
        UserError: It cannot be read, has another tokenizer, or reads other inputs than the policy.
    """
    loaded, model = read_frozen(place)
    if not has_tokenizer(loaded, tokenizer):
        raise UserError(
            f"task.reference={place}: has another tokenizer than the model; use a checkpoint of the same one"
        )
    shapes = [
        {name: value.shape for name, value in side.state_dict().items() if not is_adapter(name)}
        for side in (model, policy)
    ]
    if differing := sorted(name for name, _ in shapes[0].items() ^ shapes[1].items()):
        raise UserError(
            f"task.reference={place}: {differing[0]} differs from the model's; use a model of the same sizes"
        )
    return model


class ReferenceCache:
    """Log-probabilities of the answers of a split by a reference model, in a file of a cache folder.

    Args:
        folder, identity: As in `output_path`.
    """

    def __init__(self, folder: Path, *identity: str) -> None:
        self.path = output_path(folder, ".reference.json", *identity)

    def read(self) -> dict[str, list[float]] | None:
        """Returns the two log-probabilities of each pair by its name; None if they are not stored."""
        with suppress(OSError, ValueError):
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            if isinstance(stored, dict):
                return stored
        return None

    def write(self, scores: Mapping[str, list[float]]) -> None:
        """Stores the log-probabilities.

        Raises:
            UserError: They cannot be written.
        """
        write_outputs(self.path, CACHE_KEY, lambda path: write_text(path, json.dumps(scores)))


def look_up(scores: Mapping[str, list[float]], pairs: AnswerPairs) -> Tensor:
    """Returns the cached log-probabilities of some pairs: (N, 2).

    Raises:
        UserError: A pair could not be read when they were computed.
    """
    if missing := [name for name in pairs.names if name not in scores]:
        fault = f"{missing[0]} could not be read when its scores were stored"
        raise UserError(f"task.cache_reference: {fault}; remove the *.reference.json files from the cache", 1)
    return torch.tensor([scores[name] for name in pairs.names]).view(-1, 2)


def check_cacheable(split: Split, images: Field | None) -> None:
    """Checks that the pairs of a training split and their images are the same in every epoch.

    Raises:
        UserError: They are not; the message names the option.
    """
    changes = [*find_changes(split, images)]
    if not split.fresh and any(
        split.record(at, 0)["pairs"] != split.record(at, 1)["pairs"] for at in range(len(split))
    ):
        changes.append("other pairs of an image are read in every epoch; set data.source.pairs_per_image=null")
    if changes:
        raise UserError(f"{CACHE_KEY}: {changes[0]}, or set {CACHE_KEY}=false")


def identify_pairs(split: Split) -> str:
    """Returns a hash of the pairs of a split and of stamps of their images."""
    digest = sha256()
    for record in split.records():
        stamp = record.read_stamp() if record.read_stamp else ""
        names = [name for name, _ in name_pairs(record)]
        digest.update(json.dumps([record.id, stamp, names]).encode())
    return digest.hexdigest()
