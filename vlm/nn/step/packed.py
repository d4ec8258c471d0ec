"""Weights laid out for use on a CPU; nothing here is for training."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from vlm.nn.blocks import ACTIVATIONS, MLP, Block
from vlm.nn.vocabulary_loss import Head
from vlm.tuning import return_freed_memory

FEW_ROWS = 8  # what a layout is chosen for; it serves fewer and more as well
WIDE = 384  # D from which packed products of one row in float32 take no longer than others

# An activation as oneDNN computes it at the end of a product: its name and algorithm there.
FUSED = {
    ACTIVATIONS["relu"]: ("relu", ""),
    ACTIVATIONS["gelu"]: ("gelu", "none"),
    ACTIVATIONS["gelu_tanh"]: ("gelu", "tanh"),
}


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in the blocks that oneDNN's inner products read.

    A library that takes weights as they come copies them into blocks at each call: most of the time of a product of 8
    rows, and still a fifth with 200.

    Args:
        weight: (out, in), on the CPU.
        bias: (out,) or None.
        activation: One of FUSED, which then needs no pass of its own over the result; or None.
    Shapes:
        x (..., in) -> (..., out)
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        # The way by which torch's own compiler lays out frozen weights; layers of torch.utils.mkldnn cannot take
        # tensors as they are.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW_ROWS)
        self.bias = None if bias is None else bias.detach()
        self.fused = ("none", "") if activation is None else FUSED[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.function()(x)

    def function(self) -> Callable[[Tensor], Tensor]:
        """The layer as a function, without the machinery of modules."""
        product, weight, bias = torch.ops.mkldnn._linear_pointwise.default, self.weight, self.bias
        name, algorithm = self.fused
        return lambda x: product(x, weight, bias, name, [], algorithm)


class PackedMLP(nn.Module):
    """An MLP of packed layers.

    Shapes:
        x (..., D) -> (..., D)
    """

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        # oneDNN has no quick_gelu, which then needs a pass of its own.
        self.activation = None if mlp.activation in FUSED else mlp.activation
        self.fc1 = PackedLinear(mlp.fc1.weight, mlp.fc1.bias, mlp.activation if self.activation is None else None)
        self.fc2 = PackedLinear(mlp.fc2.weight, mlp.fc2.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.function()(x)

    def function(self) -> Callable[[Tensor], Tensor]:
        """The MLP as a function, without the machinery of modules."""
        first, second, activation = self.fc1.function(), self.fc2.function(), self.activation
        return (lambda x: second(first(x))) if activation is None else (lambda x: second(activation(first(x))))


def prepack(model: nn.Module, wanted: Callable[[str, nn.Linear], bool] = lambda name, layer: True) -> None:
    """Packs the linear layers and MLPs of a model's blocks, on a CPU where this build of torch can. Values stay.

    Args:
        wanted: Of a layer by its name in its parent; of an MLP, its first.
    """
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        if _prepack(block, lambda name, layer: _can_pack(layer.weight) and wanted(name, layer)):
            return_freed_memory()


def _prepack(module: nn.Module, wanted: Callable[[str, nn.Linear], bool]) -> bool:
    """Packs layers of a module; False where there were none."""
    packed = False
    for name, child in list(module.named_children()):
        if type(child) is MLP and wanted(name, child.fc1):
            setattr(module, name, PackedMLP(child))
        elif type(child) is nn.Linear and wanted(name, child):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        elif not _prepack(child, wanted):
            continue
        packed = True
    return packed


def prepack_for_decoding(decoder: nn.Module, *, rows: int) -> None:
    """Lays out what a decode step multiplies by, on a CPU: the linear layers of each block, and the head. Values stay.

    For several rows, packed layers take half the time; for one row in float32, a call costs more than it saves where
    layers are small.

    Args:
        rows: Texts that are mostly decoded at once, beams counted.
    """
    head: Head = decoder.head_parts  # type: ignore[assignment]
    weight = head.weight
    if weight.device.type != "cpu":
        return
    if _can_pack(weight) and (rows > 1 or weight.dtype != torch.float32 or weight.shape[1] >= WIDE):
        prepack(decoder)
        product = PackedLinear(weight, head.bias).function()
        decoder.head = lambda hidden: product(head.transformed(hidden))  # type: ignore[assignment]
    else:
        prepack(decoder, lambda name, layer: name == "kv")  # of the context: products of many rows
        _lay_out_input_major(decoder)


def _can_pack(weight: Tensor) -> bool:
    """True if torch packs such a weight on this processor."""
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and _packs(weight.dtype)


@cache
def _packs(dtype: torch.dtype) -> bool:
    """True if oneDNN packs weights of this type here: it refuses bfloat16 on processors with AVX2 alone."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(FEW_ROWS, FEW_ROWS, dtype=dtype), FEW_ROWS)
    except (AttributeError, RuntimeError):  # torch was built without the operator, or oneDNN refuses
        return False
    return True


def _lay_out_input_major(decoder: nn.Module) -> None:
    """Stores widening layers and embeddings so that a product of one row reads them in order.

    That takes 0.3 to 0.9 of the time (MKL); narrowing layers are faster as they are.
    """
    for layer in decoder.modules():
        if isinstance(layer, nn.Linear | nn.Embedding) and layer.weight.shape[0] >= layer.weight.shape[1]:
            layer.weight.data = layer.weight.data.t().contiguous().t()
