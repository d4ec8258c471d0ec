"""A GGUF file (llama.cpp) in the place of a folder of Hugging Face."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from vlm.errors import UserError
from vlm.models.pretrained.fields import Fields
from vlm.models.pretrained.folder import CONFIG, GENERATION, Folder
from vlm.models.pretrained.gguf.config import DIVISORS, config_of, folder_name, generation_of
from vlm.models.pretrained.gguf.header import read_header
from vlm.models.pretrained.gguf.tensors import check_tensors, read_tensor
from vlm.models.pretrained.gguf.tokenizer import tokenizer_files

SUFFIX = ".gguf"
PERMUTED = ("llama",)  # architectures whose queries and keys have the two halves of each head alternating
ROTATED = re.compile(r"\.[qk]_proj\.")


class GGUF(Folder):
    """A GGUF file: the files that a folder of the same model would hold, made of its header.

    Args:
        path: The file.
    Raises:
        UserError: Whatever is read is missing, damaged, too large, or not known here.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        try:
            self._header = read_header(self.path)
            check_tensors(self._header.tensors, self.path.stat().st_size)
            self._names = {name: folder_name(name) for name in self._header.tensors if name != DIVISORS}
            self._contents = self._made()
        except KeyError as fault:
            raise UserError(f"{self} cannot be read: it has no {fault.args[0]}; choose another file") from fault
        except (AttributeError, OSError, TypeError, ValueError) as fault:
            raise UserError(f"{self} cannot be read: {fault}; choose another file") from fault

    def _made(self) -> dict[str, Any]:
        """The contents of files by their names, objects in the place of JSON."""
        place = self._header.tensors.get(DIVISORS)
        config = config_of(self._header, None if place is None else read_tensor(self.path, place))
        made: dict[str, Any] = {CONFIG: config, GENERATION: generation_of(self._header)}
        if isinstance(template := self._header.values.get("tokenizer.chat_template"), str):
            made["chat_template.jinja"] = template.encode()
        return made | tokenizer_files(self._header.values, config["vocab_size"])

    def place(self, name: str) -> str:
        return str(self.path)

    def has(self, name: str) -> bool:
        return name in self._contents

    def bytes(self, name: str) -> "bytes | None":
        return self._contents.get(name)

    def _read_json(self, name: str) -> Fields | None:
        return Fields(self._contents[name], str(self.path)) if name in self._contents else None

    def weights(self, *, mapped: bool = False) -> dict[str, Tensor]:
        try:
            read = {name: read_tensor(self.path, self._header.tensors[name]) for name in self._names}
        except (OSError, ValueError) as fault:
            raise UserError(f"{self} cannot be read: {fault}; fetch it again") from fault
        tensors = {self._names[name]: tensor if mapped else tensor.clone() for name, tensor in read.items()}
        if self.config.values["model_type"] in PERMUTED:
            tensors |= {name: self._in_halves(name, tensors[name]) for name in tensors if ROTATED.search(name)}
        return tensors

    def _in_halves(self, name: str, weight: Tensor) -> Tensor:
        """Rows of queries or keys, the halves of each head one after the other, where they alternated."""
        stack, config, _ = self.parts["decoder"]
        sizes = stack.arguments(config)
        heads = sizes["num_heads"] if ".q_proj." in name else sizes["num_kv_heads"] or sizes["num_heads"]
        if len(weight) % (2 * heads):
            return weight  # which is refused for its shape
        return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
