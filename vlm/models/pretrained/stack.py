"""Maps a stack of layers, as Hugging Face describes and stores it, to one of ours: sizes and tensor names."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict, cast

import torch
from torch import Tensor, nn

from vlm.models.decoder import Decoder
from vlm.models.pretrained.fields import Entry, Fields, Values, choice, image_size, integer, number, square
from vlm.models.text_encoder import TextEncoder
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import ViT
from vlm.nn.blocks import GATES
from vlm.nn.embeddings import PatchEmbed
from vlm.nn.image_size import plain as plain_size
from vlm.nn.image_size import sides
from vlm.nn.position import GridPositions, LearnedPositions


class Spec(TypedDict):
    """The short name of a class and its arguments, as checkpoints store them; arguments may be specifications too."""

    name: str
    args: dict[str, Any]


class StackArguments(TypedDict, total=False):
    """Arguments of a `ViT`, `Decoder` or `TextEncoder`, as far as they are known; `hidden` is the width of an MLP.

    A `TimmEncoder` has a name, and its timm model determines the other sizes.
    """

    name: str
    dim: int
    depth: int
    num_heads: int
    num_kv_heads: int | None
    head_dim: int | None
    hidden: int | None
    hidden_dim: int | None
    mlp_ratio: float
    activation: str
    norm: str
    norm_eps: float
    pre_norm: bool
    qk_norm: bool | str
    attn_scale: float | None
    bias: bool
    qkv_bias: bool | None
    positions: str | Spec
    embed_norm: bool
    embed_scale: float
    vocab_size: int
    max_len: int
    token_types: int | None
    prefix: Spec
    vocabulary_head: Spec
    class_token: bool
    distillation_token: bool
    stem: str
    final_norm: bool
    patch_size: int
    image_size: int | list[int]


BLOCK_ARGUMENTS = ("dim", "num_heads", "activation", "norm", "norm_eps", "pre_norm", "qk_norm", "attn_scale", "bias")


def normalize_sizes(sizes: dict[str, Any]) -> StackArguments:
    """Replaces default values by None, and the hidden width by a ratio unless the MLP is gated."""
    dim, heads, hidden = sizes["dim"], sizes["num_heads"], sizes.pop("hidden", None)
    defaults = {"num_kv_heads": heads, "qkv_bias": sizes["bias"]} | ({} if dim % heads else {"head_dim": dim // heads})
    sizes |= {name: None for name, value in defaults.items() if sizes.get(name) == value}
    if sizes["activation"] in GATES:
        return cast(StackArguments, sizes | {"hidden_dim": hidden})
    return cast(StackArguments, {"mlp_ratio": 4.0 if hidden is None else hidden / dim} | sizes)


StackModule = ViT | Decoder | TextEncoder | TimmEncoder


def infer_sizes(stack: StackModule) -> StackArguments:
    """Returns the arguments that a stack was built with, as far as Hugging Face's configs determine them."""
    if isinstance(stack, TimmEncoder):  # its name determines all sizes
        return {}
    block: Any = stack.blocks[0]
    sizes = {name: getattr(block.config, name) for name in (*BLOCK_ARGUMENTS, "qkv_bias")}
    sizes |= {"head_dim": block.attn.head_dim, "num_kv_heads": block.attn.num_kv_heads, "hidden": block.config.hidden}
    sizes = normalize_sizes(sizes) | {"depth": len(stack.blocks), "positions": _describe_positions(stack.positions)}
    sizes["embed_norm"] = not isinstance(stack.embed_norm, nn.Identity)
    if isinstance(stack, ViT):
        return sizes | _infer_image_sizes(stack)
    sizes |= {"vocab_size": stack.token_embed.num_embeddings, "max_len": stack.max_len}
    sizes["embed_scale"] = stack.embed_scale
    if isinstance(stack, TextEncoder):
        return sizes | {"token_types": None if stack.type_embed is None else stack.type_embed.num_embeddings}
    return sizes


def _describe_positions(positions: nn.Module) -> Any:
    """Returns the kind of a position encoding, or its specification if it has options."""
    if type(positions) in (LearnedPositions, GridPositions):
        return "learned"
    name = type(positions).__name__
    return {"name": name, "args": positions.options} if hasattr(positions, "options") else name


def _infer_image_sizes(vit: ViT) -> StackArguments:
    sizes: StackArguments = {
        "class_token": vit.class_token is not None,
        "distillation_token": vit.distillation_token is not None,
        "stem": type(vit.patch_embed).__name__,
        "final_norm": not isinstance(vit.norm, nn.Identity),
    }
    if isinstance(vit.patch_embed, PatchEmbed):
        sizes["patch_size"] = vit.patch_embed.kernel_size[0]
        if isinstance(vit.positions, GridPositions):  # with other positions, a ViT accepts any image size
            rows, columns = vit.grid
            sizes["image_size"] = plain_size((sizes["patch_size"] * rows, sizes["patch_size"] * columns))
    return sizes


ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    # Equal up to rounding.
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"), "gelu_tanh"),
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}
# Values of our arguments unless a stack overrides them.
DEFAULTS: StackArguments = {
    "num_kv_heads": None,
    "head_dim": None,
    "norm": "layer",
    "pre_norm": True,
    "qk_norm": False,
    "attn_scale": None,
    "bias": True,
    "qkv_bias": None,
    "positions": "learned",
    "embed_norm": False,
}
# Sizes by the names and defaults that BERT and ViT share; "hidden" is the width of an MLP.
SIZES = {
    "dim": integer("hidden_size", 768),
    "depth": integer("num_hidden_layers", 12, high=1000),
    "num_heads": integer("num_attention_heads", 12),
    "hidden": integer("intermediate_size", 3072),
    "activation": choice("hidden_act", "gelu", ACTIVATIONS),
    "norm_eps": number("layer_norm_eps", 1e-12),
}
IMAGE_SIZES = {
    "image_size": image_size("image_size", 224),
    "patch_size": square("patch_size", 16),
    "class_token": True,
    "distillation_token": False,
    "stem": "PatchEmbed",
    "final_norm": True,
}
LAYER = re.compile(r"\.(\d+)\.")


def concatenate(*tensors: Tensor) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


class Weight(NamedTuple):
    """The stored form of one of our tensors.

    Args:
        names: Names of their tensors. "a|b" lists alternatives: the first that exists is used, and any others must be
            equal to it. "*" is the layer number, "{kind}" the last part of our name, "weight" or "bias".
        read: Converts their tensors to ours.
        write: Converts ours to theirs; by default several tensors are concatenated in ours, such as queries, keys and
            values.
        copies: Names of existing copies, each with the name of its original, such as a head tied to the embedding.
    """

    names: tuple[str, ...]
    read: Callable[..., Tensor] = concatenate
    write: Callable[[Tensor], Tensor] | None = None
    copies: tuple[tuple[str, str], ...] = ()

    @property
    def all_names(self) -> tuple[str, ...]:
        """Names of all tensors that it reads or compares."""
        return (*self.names, *(copy for copy, _ in self.copies))


# Our module -> their module, or several that are concatenated in ours.
Paths = Mapping[str, str | tuple[str, ...]]
Names = Mapping[str, str | tuple[str, ...] | Weight]  # the same of modules and tensors
WeightMap = dict[str, Weight]


def token_weight(name: str) -> Weight:
    """Maps a learned vector that theirs stores as a sequence of length one."""
    return Weight((name,), torch.flatten, lambda vector: vector[None, None])


def batched_weight(name: str) -> Weight:
    """Maps a table of vectors that theirs stores with a batch axis."""
    return Weight((name,), lambda rows: rows[0], lambda rows: rows[None])


def expand_layers(names: Paths, theirs: str) -> dict[str, tuple[str, ...]]:
    """Extends the names of a layer's modules to all blocks.

    Args:
        theirs: Name of their list of layers.
    """
    paths = {ours: (path,) if isinstance(path, str) else path for ours, path in names.items()}
    return {f"blocks.*.{ours}": tuple(f"{theirs}.*.{path}" for path in inner) for ours, inner in paths.items()}


def map_weights(names: Names, ours: Iterable[str], stored: Collection[str] = ()) -> WeightMap:
    """Maps those of our tensors that a table of names has."""
    weights: WeightMap = {}
    for name in ours:
        number = "".join(LAYER.findall(name)[:1])
        pattern = LAYER.sub(".*.", name, count=1)
        module, _, kind = pattern.rpartition(".")
        entry = names.get(pattern) or names.get(module)
        if entry is None:
            continue
        if not isinstance(entry, Weight):
            paths = (entry,) if isinstance(entry, str) else entry
            entry = Weight(paths if pattern in names else tuple(f"{path}.{{kind}}" for path in paths))
        candidates = [path.replace("*", number).replace("{kind}", kind).split("|") for path in entry.names]
        existing = [[name for name in names if name in stored] or names[:1] for names in candidates]
        copies = tuple((copy, original) for original, *duplicates in existing for copy in duplicates)
        weights[name] = entry._replace(names=tuple(first for first, *_ in existing), copies=copies)
    return weights


def list_patterns(names: Names) -> Iterator[str]:
    """Yields the names of the tensors in a table, with "*" for layer numbers and "{kind}" for "weight" or "bias"."""
    for ours, entry in names.items():
        paths = entry.names if isinstance(entry, Weight) else (entry,) if isinstance(entry, str) else entry
        plain = isinstance(entry, Weight) or ours.rpartition(".")[2] in ("weight", "bias")
        yield from (name if plain else f"{name}.{{kind}}" for path in paths for name in path.split("|"))


def add_prefixes(weights: WeightMap, ours: str, theirs: str) -> WeightMap:
    """Adds prefixes to the names on both sides."""
    return {
        f"{ours}{name}": weight._replace(
            names=tuple(f"{theirs}{stored}" for stored in weight.names),
            copies=tuple((f"{theirs}{copy}", f"{theirs}{original}") for copy, original in weight.copies),
        )
        for name, weight in weights.items()
    }


@dataclass(frozen=True, kw_only=True)
class Stack:
    """An encoder or a decoder of Hugging Face.

    Args:
        kind: Our class that computes the same.
        model_type: Its model_type in config.json.
        prefix: Prefix of its tensors in a model with a head.
        sizes: Our arguments: fields of config.json, or constant values.
        more: Returns further arguments, from these and the config.
        names: Its tensors, without prefixes.
        extra: Tensors that only some folders have.
        head: Tensors of its vocabulary head, with the prefix if theirs has it.
        unused: Tensors that ours does not need, such as poolers, masks and counters; as `list_patterns` yields.
        needed: Values of config.json that ours requires to compute the same.
        neutral_keys: Keys of config.json that change nothing in ours, besides those of all architectures.
        aliases: Further names of keys, which have to agree with them.
        exported: Further values for the config.json of an export.
        transposed: Whether linear layers of blocks are stored as (inputs, outputs).
        regrids: Whether image positions are interpolated to other grids, as in its own model.
        patch_bias: Whether its patches are projected with a bias.
    """

    kind: type[StackModule]
    model_type: str
    sizes: Mapping[str, Any]
    names: Names
    prefix: str = ""
    more: Callable[[StackArguments, Fields], StackArguments] = lambda sizes, config: {}
    extra: Names = field(default_factory=dict)
    head: Names = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    needed: Values = field(default_factory=dict)
    neutral_keys: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    exported: Values = field(default_factory=dict)
    transposed: bool = False
    regrids: bool = False
    patch_bias: bool = True

    def read_arguments(self, config: Fields) -> StackArguments:
        """Reads our arguments, including positions and the image stem.

        Raises:
            UserError: A value is invalid, or our layers do not support it.
        """
        config.require(self.needed, f"our {self.kind.__name__}")
        for alias, name in self.aliases.items():
            if alias in config and config.get(alias) != config.get(name):
                raise config.error(alias, f"and {name} is {config.get(name)!r:.60}")
        read = {name: config.read(size) if isinstance(size, Entry) else size for name, size in self.sizes.items()}
        sizes: dict[str, Any] = DEFAULTS | ({} if self.kind is ViT else {"embed_scale": 1.0}) | read
        if sizes["head_dim"] is None and sizes["dim"] % sizes["num_heads"]:
            raise config.error(self.sizes["num_heads"].name, f"which does not divide the width {sizes['dim']}")
        if sizes["num_kv_heads"] is not None and sizes["num_heads"] % sizes["num_kv_heads"]:
            raise config.error(self.sizes["num_kv_heads"].name, f"which does not divide {sizes['num_heads']} heads")
        if any(side % sizes.get("patch_size", 1) for side in sides(sizes.get("image_size", 0))):
            raise config.error("patch_size", f"which does not divide image_size={sizes['image_size']}")
        return normalize_sizes(sizes | self.more(cast(StackArguments, sizes), config))

    def map_weights(self, module: nn.Module, stored: Collection[str] = ()) -> WeightMap:
        """Maps the tensors of one of our stacks.

        Args:
            stored: Names of their existing tensors, without prefixes; if empty, the whole table is used.
        """
        ours = module.state_dict().keys()
        weights = map_weights(self.names, ours, stored)
        extra = map_weights(self.extra, ours, stored)
        if not stored or any(name in stored for weight in extra.values() for name in weight.names):
            weights |= extra  # of which a folder has all or none
        if not self.transposed:
            return weights
        linear = [name for name in weights if name.startswith("blocks.") and "norm" not in name]
        return weights | {
            name: weights[name]._replace(read=torch.t, write=torch.t) for name in linear if name.endswith(".weight")
        }

    def list_unused(self, config: Fields) -> list[str]:
        """Returns patterns of the tensors, without prefixes, that our stack does not need."""
        return [*self.unused, *list_patterns(self.extra)]


class Part(NamedTuple):
    """A stack of a folder: its part of config.json, and the prefix of its tensors."""

    stack: Stack
    config: Fields
    prefix: str = ""


def select_stack(config: Fields, *stacks: Stack) -> Stack:
    """Selects the stack that a part of config.json describes.

    Raises:
        UserError: It is none of the given stacks.
    """
    supported = {stack.model_type: stack for stack in stacks}
    model_type = str(config.get("model_type"))
    if model_type not in supported:
        raise config.error("model_type", f"where vlm supports {' or '.join(supported)}")
    return supported[model_type]


def select_towers(config: Fields, stacks: Mapping[str, Stack]) -> dict[str, Part]:
    """Returns the image and text encoders; for an image classifier, only the former."""
    names = {"encoder": "vision_config", "text_encoder": "text_config"}
    parts = {place: Part(stack, config.part(names[place])) for place, stack in stacks.items() if names[place] in config}
    heads: Any = config.values.get("architectures") or [""]
    return {"encoder": parts["encoder"]} if str(heads[0]).endswith("Classification") else parts
