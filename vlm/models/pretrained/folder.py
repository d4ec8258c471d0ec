"""A local Hugging Face folder: its files, read once and shared, the model that it describes, and quantised weights.

FP8 with scales is dequantised; every other kind is rejected by name.
"""

import json
import re
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vlm.errors import UserError
from vlm.models.pretrained.architecture import Architecture, find_architecture, list_model_types, make_spec
from vlm.models.pretrained.fields import Entry, Fields, choice, flag, integer, numbers, refuse_unread_keys
from vlm.models.pretrained.stack import Part, Spec
from vlm.nn.image_size import ImageSize, plain

QUANTISATION_KEY = "quantization_config"  # in config.json
SCALES = ".weight_scale_inv"  # factors of a weight, one for the tensor or one for each block
ACTIVATION_SCALE = ".activation_scale"  # of static FP8 activations, which full precision does not need
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
SCHEME = choice("activation_scheme", "dynamic", {"dynamic": False, "static": True})
BLOCK = numbers("weight_block_size", None, 2, 1, 2**20)
# Keys of FP8 folders, with the values that can be read.
ENTRIES: tuple[Entry, ...] = (
    choice("quant_method", None, {"fp8": "fp8"}),
    SCHEME,
    BLOCK,
    choice("fmt", "e4m3", {"e4m3": "e4m3", "e5m2": "e5m2"}),
    choice("scale_fmt", "float", {"float": "float", "ue8m0": "ue8m0"}),
    choice("expert_dtype", "fp8", {"fp8": "fp8"}),
    flag("dequantize", False),
)
# Lists of modules that are or are not quantised, which the types of their weights show.
NEUTRAL = {"modules_to_not_convert", "modules_to_convert", "ignored_layers"}
# Last parts of the names of tensors of GPTQ, AWQ, bitsandbytes, compressed-tensors, MLX and others.
QUANTISED_SUFFIXES = {
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_zero_point", "weight_packed", "weight_shape"),
    *("qweight", "qzeros", "scales", "biases", "g_idx", "weight_g_idx", "SCB", "weight_format", "zeros", "scale"),
    *("absmax", "quant_map", "nested_absmax", "nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4"),
    *("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale"),
}


class Quantisation(NamedTuple):
    """How the weights of an FP8 folder are quantised.

    Args:
        block: Rows and columns of a weight that share a scale; None for one scale per weight.
        static: Whether scales of activations are stored.
    """

    block: tuple[int, int] | None
    static: bool


def read_quantisation(config: Fields) -> Quantisation:
    """Reads the quantisation that a config.json states.

    Raises:
        UserError: It cannot be dequantised; the message names the key.
    """
    for name in ("text_config", "vision_config", "encoder", "decoder"):
        inner = config.values.get(name)
        if isinstance(inner, dict) and inner.get(QUANTISATION_KEY) is not None:
            raise config.part(name).error(QUANTISATION_KEY, "which is supported only at the top level of the file")
    if QUANTISATION_KEY not in config:
        return Quantisation(None, static=False)
    stated = config.part(QUANTISATION_KEY)
    if stated.values.get("quant_method") != "fp8":
        raise stated.error("quant_method", "where vlm supports fp8 only")
    for entry in ENTRIES:
        stated.read(entry)
    if unknown := sorted(stated.values.keys() - {entry.name for entry in ENTRIES} - NEUTRAL):
        raise stated.error(unknown[0], "an unknown key of fp8")
    block = stated.read(BLOCK)
    if block is not None and not all(type(side) is int for side in block):
        raise stated.error(BLOCK.name, "not two integers")
    return Quantisation(None if block is None else (block[0], block[1]), static=stated.read(SCHEME))


def dequantise(stored: MutableMapping[str, Tensor], config: Fields, dtype: torch.dtype) -> Iterator[str]:
    """Replaces float8 weights that have scales by their values, and removes the scales.

    Args:
        stored: A folder's tensors by name; changed in place.
        config: The content of config.json.
        dtype: Type of the dequantised weights.
    Yields:
        A line for each weight that its scales do not fit.
    Raises:
        UserError: As `read_quantisation`.
    """
    block, static = read_quantisation(config)
    for module in [name.removesuffix(SCALES) for name in stored if name.endswith(SCALES)]:
        name, scale = f"{module}.weight", stored[f"{module}{SCALES}"]
        weight = stored.get(name)
        if weight is None or weight.dtype not in FLOAT8:
            continue  # the caller reports scales without a weight
        if block is None:
            fits, rows, columns = scale.numel() == 1, len(weight), weight.numel()
        else:
            rows, columns = block
            grid = [-(-side // size) for side, size in zip(weight.shape, block, strict=False)]
            fits = weight.dim() == 2 and list(scale.shape) == grid
        if not fits or scale.dtype not in SCALE_TYPES:
            expected = "one scale" if block is None else f"a scale per block of {rows} x {columns}"
            yield (
                f"{module}{SCALES} is {tuple(scale.shape)} of {scale.dtype} for a weight {tuple(weight.shape)}, not "
                f"{expected} ({QUANTISATION_KEY}.{BLOCK.name} of config.json); choose another folder"
            )
            continue
        values, factors = weight.to(torch.float32), scale.to(torch.float32)
        if scale.numel() == 1:
            values *= factors.flatten()
        else:
            factors = factors.repeat_interleave(rows, 0)[: len(weight)]
            values *= factors.repeat_interleave(columns, 1)[:, : weight.shape[1]]
        stored[name] = values.to(dtype)
        del stored[f"{module}{SCALES}"]
        if static:
            stored.pop(f"{module}{ACTIVATION_SCALE}", None)


MAPPED = 2**20  # maximum size in bytes of a tensor that is read at once
MAX_TEXT = 2**27  # maximum size of a text file; vocabularies of 250,000 pieces take 20 million bytes
METADATA = "vlm_export.json"  # in folders that vlm exported: tokenizer and preprocessing, as in our checkpoints
CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
OLD_NORMS = re.compile(r"(?<=LayerNorm)(\.gamma|\.beta)$")  # old names of parameters of norms
NEW_NAMES = {".gamma": ".weight", ".beta": ".bias"}
MAX_ENDS = 64
TEXT_PARTS = ("decoder", "text_config")  # parts of config.json that describe the decoder
IDS = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")


class Folder:
    """A folder as `save_pretrained` writes it. Each file is read once, on demand.

    No code in it is executed, no pickle is read, and no link out of it is followed.

    Args:
        path: The folder.
    Raises:
        UserError: A file that is needed is missing, damaged, too large, or outside of the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: dict[str, Fields | None] = {}

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def config(self) -> Fields:
        """The content of config.json."""
        config = self.read_json(CONFIG)
        if config is None:
            raise UserError(f"{self} has no {CONFIG}; give a folder written by save_pretrained")
        if "auto_map" in config:
            raise UserError(f"{self} needs custom code (auto_map), which vlm never runs; choose another folder")
        return config

    @property
    def is_supported(self) -> bool:
        """True if vlm supports the folder's model_type."""
        return str(self.config.values.get("model_type")).replace("-", "_") in list_model_types()

    @cached_property
    def architecture(self) -> Architecture:
        return find_architecture(self.config)

    @cached_property
    def parts(self) -> Mapping[str, Part]:
        """Stacks by their place in our models, such as "encoder" and "decoder"."""
        return self.architecture.parts(self.config)

    @property
    def origin(self) -> str:
        """Name of the class that saved the folder, or else its model_type."""
        classes = self.config.values.get("architectures")
        kind = self.config.values.get("model_type") or self.config.values.get("architecture")  # the latter for timm
        first = classes[0] if isinstance(classes, list) and classes else kind
        return str(first)[:100]

    @cached_property
    def generation(self) -> Fields:
        """Decoding options, from generation_config.json or, in older folders, config.json."""
        if self.architecture.generation is not None:
            return self.architecture.generation(self.config)
        stated = self.read_json(GENERATION)
        inner = next((self.config.part(name).values for name in TEXT_PARTS if name in self.config), {})
        older = {**inner, **self.config.values}
        ids = {name: older[name] for name in IDS if older.get(name) is not None}
        if stated is None or not stated.values:
            return Fields({**older, **ids}, self.config.file, used={*older})  # checked with config.json
        return Fields(ids | {name: value for name, value in stated.values.items() if value is not None}, stated.file)

    @cached_property
    def special_ids(self) -> dict[str, int | None]:
        """Ids of padding, begin and end; None for an encoder, whose tokenizer has them."""
        if "decoder" not in self.parts:
            return dict.fromkeys(("pad", "bos", "eos"))
        end, *_ = self.end_ids
        start, bos, _, pad = (self.generation.read(integer(name, low=0)) if name != IDS[2] else None for name in IDS)
        begins = next((id for id in (start, bos) if id is not None), end)
        return {"pad": end if pad is None else pad, "bos": begins, "eos": end}

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end a text.

        Raises:
            UserError: There is none.
        """
        stated = self.generation.values.get("eos_token_id")
        ends: list[Any] = stated if isinstance(stated, list) else [stated]
        if not 1 <= len(ends) <= MAX_ENDS or not all(type(end) is int and end >= 0 for end in ends):
            raise self.generation.error("eos_token_id", f"not 1 to {MAX_ENDS} token ids")
        return ends

    def vlm_metadata(self, name: str) -> Any:
        """Returns an entry of METADATA, if vlm exported the folder; else None."""
        metadata = self.read_json(METADATA)
        return None if metadata is None else metadata.values.get(name)

    def read_json(self, name: str) -> Fields | None:
        """Returns the object in a JSON file; None if there is no such file."""
        if name not in self._files:
            self._files[name] = self._parse_json(name)
        return self._files[name]

    def _parse_json(self, name: str) -> Fields | None:
        content, path = self.read_text(name), self.display_path(name)
        if content is None:
            return None
        try:
            values = json.loads(content)
        except (RecursionError, ValueError) as fault:
            raise UserError(f"{path} cannot be read ({fault}); restore the file") from fault
        if not isinstance(values, dict):
            raise UserError(f"{path} cannot be read (it is not a JSON object); restore the file")
        return Fields(values, path)

    def read_text(self, name: str) -> str | None:
        """Returns the content of a text file, with its line ends; None if there is no such file."""
        content = self.read_bytes(name)
        try:
            return None if content is None else content.decode("utf-8")
        except ValueError as fault:
            raise UserError(f"{self.display_path(name)} cannot be read ({fault}); restore the file") from fault

    def display_path(self, name: str) -> str:
        """Returns the path of a file, for messages."""
        return str(self.path / name)

    def has_file(self, name: str) -> bool:
        """Returns True if there is a file with this name."""
        return self.file(name).is_file()

    def read_bytes(self, name: str) -> bytes | None:
        """Returns the content of a file other than the weights; None if there is no such file."""
        path = self.file(name)
        if not path.is_file():
            return None
        try:
            if path.stat().st_size > MAX_TEXT:
                raise ValueError(f"it has more than {MAX_TEXT:,} bytes")
            return path.read_bytes()
        except (OSError, ValueError) as fault:
            raise UserError(f"{path} cannot be read ({fault}); restore the file") from fault

    def file(self, name: str) -> Path:
        """Returns the path of a file, which may be among the blobs of huggingface_hub's cache."""
        path, root = self.path / name, self.path.resolve()
        blobs = root.parents[1] / "blobs" if root.parent.name == "snapshots" else root
        target = path.resolve()
        if not (target.is_relative_to(root) or target.is_relative_to(blobs)):
            raise UserError(
                f"{path} is a link out of the folder, which vlm does not follow; copy the file into the folder"
            )
        return path

    def read_weights(self, *, mapped: bool = False) -> MutableMapping[str, Tensor]:
        """Reads all tensors of the folder's safetensors by name, with current names of norms.

        Args:
            mapped: Whether tensors may stay memory-mapped, or be read at each access as in `LazyTensors`, for callers
                that copy them at once: if a file is truncated while it is mapped, the process crashes.
        """
        from safetensors import SafetensorError

        tensors: dict[str, Tensor] = {}
        stored: dict[str, str] = {}
        for path in self._weight_files():
            try:
                for name, tensor in _tensors(path):
                    current = OLD_NORMS.sub(lambda match: NEW_NAMES[match[0]], name)
                    if current in tensors:
                        raise UserError(
                            f"{self} has both {stored[current]} and {name}, two names of one tensor; "
                            "choose another folder"
                        )
                    tensors[current], stored[current] = tensor if mapped else tensor.clone(), name
            except (OSError, SafetensorError) as fault:
                raise UserError(f"{path} cannot be read ({fault}); download it again") from fault
        return tensors

    def _weight_files(self) -> list[Path]:
        single = self.file("model.safetensors")
        if single.is_file():
            return [single]
        if (index := self.read_json(INDEX)) is not None:
            listed = index.part("weight_map").values.values()
            names = {name for name in listed if isinstance(name, str)}
            if not all(isinstance(name, str) for name in listed):
                raise UserError(f"{index.file} cannot be read (weight_map does not list files); download it again")
            return [self.file(Path(name).name) for name in sorted(names)]  # shards are in the folder of the index
        if any(self.path.glob("pytorch_model*.bin*")):
            kind = self.origin if self.origin.isidentifier() else "AutoModel"
            raise UserError(
                f"{self} holds only pytorch_model.bin, a pickle, which vlm does not read; convert it:\n"
                f"  python -c \"import transformers as t; t.{kind}.from_pretrained('{self}')"
                f".save_pretrained('{self}')\""
            )
        raise UserError(f"{self} has no model.safetensors; give a folder written by save_pretrained")


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of a file. Maps large tensors separately, so that each can be freed."""
    from safetensors import safe_open

    large: list[str] = []
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a dict
            tensor = file.get_tensor(name)
            if tensor.nbytes > MAPPED:
                large.append(name)
            else:
                yield name, tensor.clone()
    for name in large:
        with safe_open(path, framework="pt") as file:
            yield name, file.get_tensor(name)


class FolderSpecification(NamedTuple):
    """A folder's model.

    Args:
        task: Its task; None for a model without a head.
        model: Its specification; None for a model without a head.
        parts: The specifications of its stacks by place, such as "encoder" and "decoder".
    """

    task: str | None
    model: Spec | None
    parts: Mapping[str, Spec]


def specify(folder: Folder, *, image_size: ImageSize | None = None) -> FolderSpecification:
    """Specifies the model of a folder.

    Args:
        image_size: Size of the images to use, for models whose positions may be interpolated.
    Raises:
        UserError: Our layers do not support it.
    """
    read_quantisation(folder.config)
    parts = {place: _specify_part(part, image_size) for place, part in folder.parts.items()}
    if folder.origin not in folder.architecture.models:
        specified = FolderSpecification(None, None, parts)
    else:
        task, build = folder.architecture.models[folder.origin]
        specified = FolderSpecification(task, build(folder.config, parts), parts)
    refuse_unread_keys(folder.config, collect_neutral_keys(folder))
    return specified


def collect_neutral_keys(folder: Folder) -> dict[str, set[str]]:
    """Returns the keys that change nothing, by the path of an object in config.json."""
    neutral = {"": {*folder.architecture.neutral_keys}}
    for stack, config, _ in folder.parts.values():
        neutral.setdefault(config.within, set()).update(stack.neutral_keys)
    return neutral


def _specify_part(part: Part, image_size: ImageSize | None) -> Spec:
    stack, config, _ = part
    if stack.regrids and image_size is not None:
        config |= {"image_size": plain(image_size)}
    sizes: dict[str, Any] = {**stack.read_arguments(config)}
    if not stack.patch_bias:
        sizes["patch_bias"] = False
    sizes.pop("stem", None)  # plain patches are the default, as are learned positions
    defaults = {"positions": "learned", "final_norm": True}
    sizes = {name: value for name, value in sizes.items() if name not in defaults or defaults[name] != value}
    if "mlp_ratio" in sizes:  # a ratio that gives a block exactly their hidden width, although blocks round down
        dim, hidden = sizes["dim"], round(sizes["mlp_ratio"] * sizes["dim"])
        sizes["mlp_ratio"] = hidden / dim if int(dim * (hidden / dim)) == hidden else (hidden + 0.5) / dim
    return make_spec(stack.kind.__name__, **sizes)
