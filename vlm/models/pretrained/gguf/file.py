"""Reads a GGUF file (llama.cpp) like a Hugging Face folder."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vlm.errors import UserError
from vlm.models.pretrained.fields import Fields, Values
from vlm.models.pretrained.folder import CONFIG, GENERATION, Folder
from vlm.models.pretrained.gguf.config import (
    OPTION_KEYS,
    find_ends,
    make_config,
    make_generation_config,
    make_tokenizer_files,
)
from vlm.models.pretrained.gguf.families import (
    DIVISORS,
    HEAD,
    SIZE_KEYS,
    DecoderConfig,
    StoredTensor,
    convert_from_file,
    list_tensors,
    read_sizes,
)
from vlm.models.pretrained.gguf.header import TensorLocation, read_parts

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Types that the package gguf dequantises.
TYPES = (
    *(*PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
    *("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)


def match_tensors(tensors: Mapping[str, TensorLocation], config: DecoderConfig) -> list[StoredTensor]:
    """Returns the tensors of a decoder with this content of config.json.

    Raises:
        ValueError: A tensor is missing, has another shape, or does not belong to the model.
    """
    matched: list[StoredTensor] = []
    for stored in list_tensors(config, untied=HEAD in tensors):
        if stored.name not in tensors:
            raise ValueError(f"it has no tensor {stored.name!r}")
        if (shape := tensors[stored.name].shape) != stored.shape:
            raise ValueError(f"the tensor {stored.name!r} is of shape {shape}, its header states {stored.shape}")
        matched.append(stored)
    if unknown := next(iter(tensors.keys() - {stored.name for stored in matched}), None):
        kind, layers = config["model_type"], read_sizes(config)["layers"]
        raise ValueError(f"the tensor {unknown!r:.60} is not one of {kind} with {layers} layers")
    return matched


VALUES_AT_ONCE = 2**18  # that are dequantised together: few enough for the processor's cache


def check_tensors(tensors: Mapping[str, TensorLocation]) -> None:
    """Checks that all tensors have known types and are inside the file.

    Raises:
        ValueError: A tensor has an unknown type or an invalid shape, or is not inside the file.
    """
    sizes = {path: path.stat().st_size for path in {location.path for location in tensors.values()}}
    kinds = {kind.value: kind.name for kind in import_gguf().GGMLQuantizationType}
    for name, location in tensors.items():
        if (kind := kinds.get(location.kind, location.kind)) not in TYPES:
            raise ValueError(f"{name!r:.60} is of type {kind}, not one of {', '.join(TYPES)}")
        block, _ = _block_size(location)
        if not location.shape or location.shape[-1] % block or 0 in location.shape:
            raise ValueError(
                f"{name!r:.60} is of shape {location.shape}, whose rows are not multiples of blocks of {block} numbers"
            )
        if location.offset + _count_bytes(location) > sizes[location.path]:
            raise ValueError(f"{name!r:.60} ends after the end of the file, which is truncated")


def read_tensor(location: TensorLocation) -> Tensor:
    """Reads a checked tensor: one that is not quantised in its type, others in float32."""
    import numpy as np

    content = np.memmap(location.path, np.uint8, "c", location.offset, (_count_bytes(location),)).view(np.ndarray)
    library = import_gguf()
    kind = library.GGMLQuantizationType(location.kind)
    if kind.name in PLAIN:
        return torch.from_numpy(content).view(PLAIN[kind.name]).view(location.shape).clone()
    block, size = _block_size(location)
    tensor = torch.empty(location.shape)
    values, blocks, step = tensor.view(-1, block).numpy(), content.reshape(-1, size), VALUES_AT_ONCE // block
    for start in range(0, len(blocks), step):  # blocks do not depend on their rows
        part = library.dequantize(blocks[start : start + step].reshape(1, -1), kind)
        values[start : start + step] = part.reshape(-1, block)
    return tensor


def _block_size(location: TensorLocation) -> tuple[int, int]:
    """Returns the number of values in a block, and its size in bytes."""
    library = import_gguf()
    block, size = library.GGML_QUANT_SIZES[library.GGMLQuantizationType(location.kind)]
    return block, size


def _count_bytes(location: TensorLocation) -> int:
    block, size = _block_size(location)
    return math.prod(location.shape) // block * size


def import_gguf() -> Any:
    """Imports the package gguf.

    Raises:
        UserError: It is not installed.
    """
    try:
        import gguf
    except ImportError as fault:
        raise UserError('GGUF files need the package gguf; pip install "vlm-lightning[gguf]"') from fault
    return gguf


Item = TypeVar("Item")
Result = TypeVar("Result")


class LazyTensors(MutableMapping[str, Tensor]):
    """Tensors by name, each of which is read at every access and not kept.

    Args:
        readers: A function per name. What it returns shares memory neither with a file nor with other results.
    """

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._readers = dict(readers)

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        self._readers[name] = lambda: tensor

    def __delitem__(self, name: str) -> None:
        del self._readers[name]

    def __contains__(self, name: object) -> bool:  # by default it would read the tensor
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def read_ahead(read: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yields the result for each item in order, while a thread computes the next one."""
    following: Future[Result] | None = None
    with ThreadPoolExecutor(1) as pool:  # more threads are no faster, and hold more memory
        for item in items:
            current, following = following, pool.submit(read, item)
            if current is not None:
                yield current.result()
        if following is not None:
            yield following.result()


SUFFIX = ".gguf"


class _HeaderFields(Fields):
    """Fields converted from a header, whose errors name the header's key."""

    def __or__(self, values: Values) -> Fields:
        return _HeaderFields({**self.values, **values}, self.file, self.within, self.used)

    def error(self, name: str, words: str) -> UserError:
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
        self._read()

    def _read(self) -> None:
        try:
            self._header = read_parts(self.path)
            check_tensors(self._header.tensors)
            self._contents = self._create_files()
        except KeyError as fault:
            raise UserError(f"{self} cannot be read: it has no {fault.args[0]}; choose another file") from fault
        except (AttributeError, OSError, TypeError, ValueError) as fault:
            raise UserError(f"{self} cannot be read: {fault}; choose another file") from fault

    def _create_files(self) -> dict[str, Any]:
        """Returns the contents of files by name, with objects for JSON."""
        values, tensors = self._header.values, dict(self._header.tensors)
        divisors = tensors.pop(DIVISORS, None)
        config = make_config(self._header, None if divisors is None else read_tensor(divisors))
        self._stored, self._decoder_config = match_tensors(tensors, config), config
        ends = find_ends(values)
        files: dict[str, Any] = {CONFIG: config, GENERATION: make_generation_config(values, ends)}
        if (template := values.get("tokenizer.chat_template")) is not None:
            files["chat_template.jinja"] = template.encode()
        return files | make_tokenizer_files(values, config["vocab_size"], ends)

    @cached_property
    def generation(self) -> Fields:
        return _HeaderFields(self._contents[GENERATION], str(self.path))

    def display_path(self, name: str) -> str:
        return str(self.path)

    def has_file(self, name: str) -> bool:
        return name in self._contents

    def read_bytes(self, name: str) -> bytes | None:
        return self._contents.get(name)

    def _parse_json(self, name: str) -> Fields | None:
        if name not in self._contents:
            return None
        return _HeaderFields(self._contents[name], str(self.path))

    def read_weights(self, *, mapped: bool = False) -> MutableMapping[str, Tensor]:
        tensors = LazyTensors(self._make_readers())
        return tensors if mapped else dict(tensors)

    def _make_readers(self) -> dict[str, Callable[[], Tensor]]:
        """Returns a function per tensor of the folder, which reads it.

        They raise a UserError if the file cannot be read.
        """
        return {stored.in_folder: partial(self._read_stored, stored) for stored in self._stored}

    def _read_stored(self, stored: StoredTensor) -> Tensor:
        try:
            tensor = read_tensor(self._header.tensors[stored.name])
        except (OSError, ValueError) as fault:
            raise UserError(f"{self} cannot be read: {fault}; download it again") from fault
        return convert_from_file(stored, tensor, self._decoder_config)
