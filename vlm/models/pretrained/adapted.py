"""Reads a Hugging Face folder with adapters of the peft library, which are merged into its weights."""

import re
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vlm.errors import UserError
from vlm.models.pretrained.fields import Fields, choice, flag, integer, number, refuse_unread_keys
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.place import ADAPTER_CONFIG

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the names of all tensors
A, B = ".lora_A.weight", ".lora_B.weight"
# Initial values that leave the base as it is, other than those computed from it.
INITIALIZATIONS = {True: True, False: False, "gaussian": True, "orthogonal": True, "eva": True}
# Keys that change nothing: the description of a base, and what matters in training only. The tensors show which modules
# were excluded, and megatron_core is only read with megatron_config.
NEUTRAL_KEYS = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
    *("eva_config", "exclude_modules", "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
}


class Settings(NamedTuple):
    """The content of an adapter_config.json.

    Args:
        rank: Rank of all adapters.
        scale: Factor of the update B A.
        targets: Ends of the names of the adapted modules; None if a pattern selects them.
        saved: Ends of the names of modules that are stored whole.
    """

    rank: int
    scale: float
    targets: list[str] | None
    saved: list[str]


class AdapterFolder(Folder):
    """A folder that peft's `save_pretrained` wrote."""

    def _weight_files(self) -> list[Path]:
        if not (path := self.file(WEIGHTS)).is_file():
            raise UserError(f"{self} has no {WEIGHTS}; save the adapters with safe_serialization=True")
        return [path]

    def read_settings(self, *, transposes: bool) -> Settings:
        """Reads adapter_config.json.

        Args:
            transposes: Whether the base stores linear layers as (inputs, outputs), as GPT-2 does.
        Raises:
            UserError: A value is invalid, or not supported.
        """
        config = self.read_json(ADAPTER_CONFIG)
        if config is None:
            raise UserError(f"{self} has no {ADAPTER_CONFIG}; give a folder written by peft")
        config.require({"peft_type": "LORA", "bias": "none"}, "vlm")
        config.read(choice("init_lora_weights", True, INITIALIZATIONS))
        if config.read(flag("fan_in_fan_out", False)) and not transposes:
            raise config.error("fan_in_fan_out", "but the base stores no layer as (inputs, outputs)")
        rank, alpha = config.read(integer("r", 8)), config.read(number("lora_alpha", 8, 0, 2**20))
        targets = config.get("target_modules")
        names = [] if targets is None else _read_names(config, "target_modules", targets)
        saved = config.get("modules_to_save")
        settings = Settings(
            rank=rank,
            scale=alpha / (rank**0.5 if config.read(flag("use_rslora", False)) else rank),
            targets=None if isinstance(targets, str) else names,
            saved=[] if saved is None else _read_names(config, "modules_to_save", saved),
        )
        refuse_unread_keys(config, {"": NEUTRAL_KEYS})
        return settings


def _read_names(config: Fields, key: str, value: object) -> list[str]:
    """Returns a list of names; none for a pattern, which `target_modules` may be."""
    if key == "target_modules" and isinstance(value, str):
        return []
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise config.error(key, "not a list of names")
    return value


class AdaptedFolder(Folder):
    """A folder whose weights have adapters merged into them, in float64: W + s B A.

    Args:
        path: The base.
        adapters: Folder of the adapters.
    """

    def __init__(self, path: str | Path, adapters: str | Path) -> None:
        super().__init__(path)
        self.adapters = AdapterFolder(adapters)

    def read_weights(self, *, mapped: bool = False) -> MutableMapping[str, Tensor]:
        """As of a folder; what is merged is at least float32.

        Raises:
            UserError: The adapters do not match the base; the message names the tensor.
        """
        stored = super().read_weights(mapped=mapped)
        transposes = any(part.stack.transposed for part in self.parts.values())
        settings, tensors = self.adapters.read_settings(transposes=transposes), self.adapters.read_weights()
        used = {self.architecture.rename(name): name for name in stored}
        modules = name_modules(self, used)
        named = {original: modules[name] for name, original in used.items()}
        places = used | {module: original for original, module in named.items()}
        heads = find_tied_heads(self)
        given = {self.architecture.rename(name.removeprefix(PREFIX)) for name in tensors}
        own = tuple(f"{prefix}{stack.prefix}" for stack, _, prefix in self.parts.values() if stack.transposed)
        for name in sorted(tensors):
            inner = name.removeprefix(PREFIX)
            path = inner.removesuffix(A).removesuffix(B)
            is_adapter = path != inner
            target = f"{path}.weight" if is_adapter else inner
            place = places.get(target) or places.get(self.architecture.rename(target))
            # As in peft, "norm" also selects input_layernorm; a module is saved with the modules in it.
            is_saved = not is_adapter and any(f"{end}." in inner for end in settings.saved)
            if place is None and is_saved and self.architecture.rename(inner) in heads.values():
                stored[inner] = tensors[name]  # compared with the embedding when the weights are used
                continue
            if inner == name or place is None:
                raise self._tensor_error(name, f"has no place in {self}; give the adapters' own base")
            weight = stored[place]
            if not is_adapter:
                if not is_saved:
                    raise self._tensor_error(name, "is neither an adapter of LoRA nor in modules_to_save")
                if tensors[name].shape != weight.shape:
                    raise self._tensor_error(
                        name, f"is {tuple(tensors[name].shape)}, that of {self} is {tuple(weight.shape)}"
                    )
                if heads.get(self.architecture.rename(place), name) not in (name, *given):
                    raise self._tensor_error(
                        name, f"is in modules_to_save without the output head, which {self} ties to it"
                    )
                stored[place] = tensors[name]
                continue
            if settings.targets is not None and not _is_selected(path, settings.targets):
                raise self._tensor_error(name, "is not in target_modules")
            counterpart = f"{PREFIX}{path}{B if inner.endswith(A) else A}"
            if counterpart not in tensors:
                raise self._tensor_error(counterpart, "is missing")
            if inner.endswith(A):
                update = self._multiply(tensors, path, settings, transposed=named[place].startswith(own))
                if update.shape != weight.shape:
                    words = f"with its lora_B changes a matrix {tuple(update.shape)}"
                    raise self._tensor_error(name, f"{words}, that of {self} is {tuple(weight.shape)}")
                if not weight.is_floating_point() or weight.itemsize < 2:
                    raise self._tensor_error(name, f"changes a quantised weight of {self}; give weights that are not")
                dtype = torch.promote_types(weight.dtype, torch.float32)
                stored[place] = torch.add(weight.double(), update, alpha=settings.scale).to(dtype)
        return stored

    def _multiply(self, tensors: Mapping[str, Tensor], path: str, settings: Settings, *, transposed: bool) -> Tensor:
        a, b = tensors[f"{PREFIX}{path}{A}"], tensors[f"{PREFIX}{path}{B}"]
        for name, tensor, axis in ((A, a, 0), (B, b, -1)):
            if tensor.ndim != 2 or tensor.shape[axis] != settings.rank or not tensor.is_floating_point():
                words = f"is {tuple(tensor.shape)}, which is no matrix of rank {settings.rank}"
                raise self._tensor_error(f"{PREFIX}{path}{name}", words)
        update = b.double() @ a.double()
        return update.t() if transposed else update

    def _tensor_error(self, name: str, words: str) -> UserError:
        return UserError(f"{self.adapters}: {name:.200} {words}; choose other adapters")


def _is_selected(path: str, ends: Collection[str]) -> bool:
    return any(path == end or path.endswith(f".{end}") for end in ends)


def find_tied_heads(folder: Folder) -> dict[str, str]:
    """Returns the name of the output head of each embedding that a folder ties to it, as the tables name both."""
    tied: dict[str, str] = {}
    for stack, config, prefix in folder.parts.values():
        names = stack.head.get("token_embed.weight")
        if isinstance(names, str) and "vocabulary_head" not in stack.read_arguments(config):
            *embeddings, head = (f"{prefix}{name}" for name in names.split("|"))
            tied |= dict.fromkeys(embeddings, head)
    return tied


def name_modules(folder: Folder, stored: Collection[str]) -> dict[str, str]:
    """Returns the names of a folder's tensors in the class of transformers that it names.

    Args:
        stored: The names that the tables use, as `Architecture.rename` returns them.
    """
    named = {}
    for name in stored:
        current = name
        for stack, _, prefix in folder.parts.values():
            # Saved without its head; encoders inside another model never have the prefix of a model with a head.
            if not prefix and not any(other.startswith(stack.prefix) for other in stored):
                current = f"{stack.prefix}{name}"
        for pattern, new in folder.architecture.modules:
            current = re.sub(pattern, new, current)
        named[name] = current
    return named
