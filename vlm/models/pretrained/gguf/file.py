"""Reads a GGUF file (llama.cpp) like a Hugging Face folder."""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from vlm.errors import UserError
from vlm.models.pretrained.fields import Fields
from vlm.models.pretrained.folder import CONFIG, GENERATION, Folder
from vlm.models.pretrained.gguf.config import DIVISORS, SIZE_KEYS, config_of
from vlm.models.pretrained.gguf.generation import OPTION_KEYS, find_ends, generation_of
from vlm.models.pretrained.gguf.split import read_parts
from vlm.models.pretrained.gguf.tensors import check_tensors, folder_names, read_tensor
from vlm.models.pretrained.gguf.tokenizer import tokenizer_files

SUFFIX = ".gguf"
PERMUTED = ("llama",)  # architectures in which the two halves of each head of queries and keys alternate
ROTATED = re.compile(r"\.[qk]_proj\.")


class _HeaderFields(Fields):
    """Fields made from a header; an error names the header's key."""

    def __or__(self, values: Mapping[str, Any]) -> Fields:
        return _HeaderFields({**self.values, **values}, self.file, self.within, self.used)

    def fault(self, name: str, words: str) -> UserError:
        value = " ".join(f"{self.values.get(name)!r:.60}".split())
        kind = self.values.get("model_type")
        key = f"{kind}.{SIZE_KEYS[name]}" if name in SIZE_KEYS else OPTION_KEYS.get(name, name)
        return UserError(f"{self.file}: {key} is {value}, {words}; choose another file")


class GGUF(Folder):
    """A GGUF file, or all parts of a split one; the files of an equivalent folder are created from its header.

    Args:
        path: The file, or any part of a split one.
    Raises:
        UserError: The file is missing, damaged, too large, or not supported.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        try:
            self._header = read_parts(self.path)
            check_tensors(self._header.tensors)
            self._contents = self._made()
        except KeyError as fault:
            raise UserError(f"{self} cannot be read: it has no {fault.args[0]}; choose another file") from fault
        except (AttributeError, OSError, TypeError, ValueError) as fault:
            raise UserError(f"{self} cannot be read: {fault}; choose another file") from fault

    def _made(self) -> dict[str, Any]:
        """The contents of files by name, with objects for JSON."""
        values, places = self._header.values, dict(self._header.tensors)
        divisors = places.pop(DIVISORS, None)
        config = config_of(self._header, None if divisors is None else read_tensor(divisors))
        self._names = folder_names(places, config)
        ends = find_ends(values)
        made: dict[str, Any] = {CONFIG: config, GENERATION: generation_of(values, ends)}
        if (template := values.get("tokenizer.chat_template")) is not None:
            made["chat_template.jinja"] = template.encode()
        return made | tokenizer_files(values, config["vocab_size"], ends)

    @cached_property
    def generation(self) -> Fields:
        return _HeaderFields(self._contents[GENERATION], str(self.path))

    def place(self, name: str) -> str:
        return str(self.path)

    def has(self, name: str) -> bool:
        return name in self._contents

    def bytes(self, name: str) -> "bytes | None":
        return self._contents.get(name)

    def _read_json(self, name: str) -> Fields | None:
        if name not in self._contents:
            return None
        return _HeaderFields(self._contents[name], str(self.path))

    def weights(self, *, mapped: bool = False) -> dict[str, Tensor]:
        try:
            read = {name: read_tensor(self._header.tensors[name]) for name in self._names}
        except (OSError, ValueError) as fault:
            raise UserError(f"{self} cannot be read: {fault}; fetch it again") from fault
        tensors = {self._names[name]: tensor if mapped else tensor.clone() for name, tensor in read.items()}
        if self.config.values["model_type"] in PERMUTED:
            tensors |= {name: self._in_halves(name, tensors[name]) for name in tensors if ROTATED.search(name)}
        return tensors

    def _in_halves(self, name: str, weight: Tensor) -> Tensor:
        """Reorders rows of queries or keys, so that the alternating halves of each head follow one another."""
        stack, config, _ = self.parts["decoder"]
        sizes = stack.arguments(config)
        heads = sizes["num_heads"] if ".q_proj." in name else sizes["num_kv_heads"] or sizes["num_heads"]
        if len(weight) % (2 * heads):
            return weight  # its shape is rejected later
        return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
