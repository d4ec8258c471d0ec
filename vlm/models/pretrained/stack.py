"""A stack of layers as Hugging Face describes and stores it, in our terms: what each of `architectures` is made of."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vlm.errors import UserError

# Name of a tensor of ours -> names of theirs, and what makes ours of them.
Source = tuple[tuple[str, ...], Callable[..., Tensor]]
Sources = dict[str, Source]
Names = Collection[str]
Table = Mapping[
    str, str | tuple[str, ...]
]  # module of ours -> module of theirs, or several that lie end to end in ours

ACTIVATION_NAMES = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
ACTIVATION_KEYS = ("activation_function", "hidden_act")
PLAIN = {  # of all of them, unless they say otherwise
    "num_kv_heads": None,
    "head_dim": None,
    "norm": "layer",
    "pre_norm": True,
    "qk_norm": False,
    "bias": True,
    "positions": "learned",
}


@dataclass(frozen=True, kw_only=True)
class Stack:
    """An encoder or a decoder of Hugging Face.

    Args:
        kind: Class of ours that computes the same.
        stem: Stands before the names of its tensors in a model that has a head.
        sizes: Arguments of ours, of its part of config.json, which may leave out what is the family's default; an
            activation that is None is none of ours.
        sources: Sources of a stack of ours, of it and the names of theirs that there are; without prefix and stem.
        head: The same of its own head on tokens; names of theirs without prefix.
        needed: Values in config.json without which ours computes something else; one left out is as needed.
        regrids: Whether positions of images are interpolated to another grid, as its own model does.
    """

    kind: type
    sizes: Callable[[Mapping[str, Any]], dict[str, Any]]
    sources: Callable[[Any, Names], Sources]
    stem: str = ""
    head: Callable[[Any, Names], Sources] = lambda stack, names: {}
    needed: Mapping[str, Any] = field(default_factory=dict)
    regrids: bool = False

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of ours, positions and stem of images among them.

        Raises:
            TypeError, ValueError, ZeroDivisionError: A value is not what it should be.
        """
        return PLAIN | {name: value for name, value in self.sizes(config).items() if value is not None}

    def not_ours(self, config: Mapping[str, Any]) -> Iterator[str]:
        """Yields what a config.json asks for that our layers do not do."""
        for name, needed in self.needed.items():
            if config.get(name, needed) != needed:
                yield f"{name}={config[name]!s:.40}"
        for name in ACTIVATION_KEYS:
            if name in config and config[name] not in ACTIVATION_NAMES:
                yield f"{name}={config[name]!s:.40}"


class Part(NamedTuple):
    """A stack of a folder: its part of config.json, and the prefix of its tensors."""

    stack: Stack
    config: Mapping[str, Any]
    prefix: str = ""


def same(tensor: Tensor) -> Tensor:
    return tensor


def end_to_end(*tensors: Tensor) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def tied(embedding: Tensor, head: Tensor) -> Tensor:
    """The one embedding of input and output, where a folder holds both."""
    if not torch.equal(embedding, head):
        raise UserError("the head's weights are not the embedding's; our model has one for input and output")
    return embedding


def modules(
    table: Table, *, ours: str = "", theirs: str = "", make: Callable[[str, str], Callable[..., Tensor]] | None = None
) -> Sources:
    """The weight and bias of each module of a table.

    Args:
        ours, theirs: Prefixes of the names.
        make: Of a module's name and "weight" or "bias", what makes ours of theirs; by default they lie end to end.
    """
    sources: Sources = {}
    for name, others in table.items():
        for kind in ("weight", "bias"):
            names = tuple(f"{theirs}{other}.{kind}" for other in ((others,) if isinstance(others, str) else others))
            sources[f"{ours}{name}.{kind}"] = (names, end_to_end if make is None else make(name, kind))
    return sources


def layers(blocks: Sized, table: Table, theirs: str) -> Sources:
    """The modules of all blocks; theirs lie under a name and a number."""
    sources: Sources = {}
    for number in range(len(blocks)):
        sources |= modules(table, ours=f"blocks.{number}.", theirs=f"{theirs}.{number}.")
    return sources


def prefixed(sources: Sources, ours: str, theirs: str) -> Sources:
    """Sources with prefixes before both sides' names."""
    return {
        f"{ours}{name}": (tuple(f"{theirs}{other}" for other in names), make) for name, (names, make) in sources.items()
    }


def side(size: Any) -> int:
    """The side of a square that a config states as one number or as two.

    Raises:
        ValueError: It is no square.
    """
    if isinstance(size, list):
        if len(set(size)) != 1:
            raise ValueError(f"{size} is no square")
        return size[0]
    return size


def stack_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a stack of blocks, by the names that BERT and ViT share, with the defaults of both."""
    dim = config.get("hidden_size", 768)
    return {
        "dim": dim,
        "depth": config.get("num_hidden_layers", 12),
        "num_heads": config.get("num_attention_heads", 12),
        "mlp_ratio": config.get("intermediate_size", 3072) / dim,
        "activation": ACTIVATION_NAMES.get(config.get("hidden_act", "gelu")),
        "norm_eps": config.get("layer_norm_eps", 1e-12),
    }
