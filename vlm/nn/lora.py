"""Low-rank adapters (LoRA, Hu et al. 2022): linear layers learn a low-rank update while their weights stay frozen."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import Count, Range

A, B = "lora_a", "lora_b"


class AdaptedLinear(nn.Linear):
    """x -> W x + b + α/r B A x (Hu et al. 2022, equation 3). A and B are trained; B starts at zero.

    Args:
        layer: Layer whose weight and bias are reused, under the same names.
        rank: Rank r of the update.
        scale: Factor α/r of the update.
    Shapes:
        x (..., in) -> (..., out)
    """

    def __init__(self, layer: nn.Linear, *, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias, self.scale = layer.weight, layer.bias, scale
        self.lora_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)  # as in nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


class LoRA:
    """Adapters of a model: which layers get one, and of what size.

    Args:
        rank: Rank r of an update.
        alpha: Factor of an update times r, so that another rank needs no other learning rate.
        projections: Patterns for the ends of layer names, such as "qkv", "cross_attn.q" or "decoder.*.fc1".
        modules_to_save: Modules whose weights are trained themselves, such as "encoder.projector".
    """

    def __init__(
        self,
        *,
        rank: Count,
        alpha: Annotated[float, Range(above=0)],
        projections: Annotated[Sequence[str], Range(1)],
        modules_to_save: Sequence[str] = (),
    ) -> None:
        self.rank, self.scale, self.projections = rank, alpha / rank, projections
        self.modules_to_save = tuple(modules_to_save)

    def layers(self, model: nn.Module, without: Iterable[str] = ()) -> Iterator[tuple[str, nn.Linear]]:
        """Yields names and layers that get an adapter, except those inside the parts `without`."""
        for name, layer in model.named_modules():
            matches = any(fnmatchcase(f".{name}", f"*.{pattern}") for pattern in self.projections)
            if (
                matches
                and isinstance(layer, nn.Linear)
                and not any(f"{name}.".startswith(f"{part}.") for part in without)
            ):
                yield name, layer

    def adapt(self, model: nn.Module, without: Iterable[str] = ()) -> int:
        """Adds the adapters to a model; returns their number.

        Args:
            without: Names of parts to skip, for example frozen ones.
        """
        layers = list(self.layers(model, tuple(without)))
        for name, layer in layers:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, AdaptedLinear(layer, rank=self.rank, scale=self.scale))
        return len(layers)


def is_adapter(name: str) -> bool:
    """Returns True for the name of an adapter's weight."""
    return name.endswith((f".{A}", f".{B}"))


def merge_adapters(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """The state dict with adapters merged into the weights: W + α/r B A."""
    merged = {name: tensor for name, tensor in state.items() if not is_adapter(name)}
    for name in [name for name in state if name.endswith(f".{A}")]:
        stem = name.removesuffix(A)
        weight, low = merged[f"{stem}weight"], state[f"{stem}{B}"].double() @ state[name].double()
        merged[f"{stem}weight"] = torch.add(weight.double(), low, alpha=scale).to(weight.dtype)
    return merged
