"""Linear layers with weights packed for inference on a CPU."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from vlm.nn.blocks import ACTIVATIONS, MLP, Block
from vlm.nn.vocabulary_loss import Head
from vlm.tuning import return_freed_memory

FEW_ROWS = 8  # batch size that the layout is optimised for; others work too
WIDE = 384  # width D from which packed products of one row in float32 are not slower

# Activations that oneDNN fuses into a product: name and algorithm.
FUSED = {
    ACTIVATIONS["relu"]: ("relu", ""),
    ACTIVATIONS["gelu"]: ("gelu", "none"),
    ACTIVATIONS["gelu_tanh"]: ("gelu", "tanh"),
    ACTIVATIONS["silu"]: ("swish", ""),
}


class PackedLinear(nn.Module):
    """A linear layer whose weight is stored in the blocked layout of oneDNN.

    With plain weights oneDNN copies them into blocks at each call: most of the time of a product of 8 rows, and still a
    fifth with 200.

    Args:
        weight: (out, in), on the CPU.
        bias: (out,) or None.
        activation: One of FUSED, computed inside the product; or None.
    Shapes:
        x (..., in) -> (..., out)
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        # torch's own compiler packs frozen weights with this operator; layers of torch.utils.mkldnn do not take
        # ordinary tensors.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW_ROWS)
        self.bias = None if bias is None else bias.detach()
        self.fused = ("none", "") if activation is None else FUSED[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.function()(x)

    def function(self) -> Callable[[Tensor], Tensor]:
        """The layer as a plain function, without the overhead of modules."""
        product, weight, bias = torch.ops.mkldnn._linear_pointwise.default, self.weight, self.bias
        name, algorithm = self.fused
        return lambda x: product(x, weight, bias, name, [], algorithm)


class PackedMLP(nn.Module):
    """An MLP with packed layers.

    Shapes:
        x (..., D) -> (..., D)
    """

    def __init__(self, mlp: MLP) -> None:
        super().__init__()
        # oneDNN does not have quick_gelu, so it runs as a separate step.
        self.activation = None if mlp.activation in FUSED else mlp.activation
        self.fc1 = PackedLinear(mlp.fc1.weight, mlp.fc1.bias, mlp.activation if self.activation is None else None)
        self.fc2 = PackedLinear(mlp.fc2.weight, mlp.fc2.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.function()(x)

    def function(self) -> Callable[[Tensor], Tensor]:
        """The MLP as a plain function, without the overhead of modules."""
        first, second, activation = self.fc1.function(), self.fc2.function(), self.activation
        return (lambda x: second(first(x))) if activation is None else (lambda x: second(activation(first(x))))


def prepack(model: nn.Module, wanted: Callable[[str, nn.Linear], bool] = lambda name, layer: True) -> None:
    """Packs the linear layers and MLPs of a model's blocks on a CPU, if this build of torch can. Results do not change.

    Args:
        wanted: Selects layers by name and layer; called with the first layer of an MLP.
    """
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        _prepack(block, lambda name, layer: _can_pack(layer.weight) and wanted(name, layer))


def _prepack(module: nn.Module, wanted: Callable[[str, nn.Linear], bool]) -> None:
    for name in [name for name, _ in module.named_children()]:
        child: Any = module.get_submodule(name)  # the only reference to a layer, which is freed as soon as it is packed
        if type(child) is MLP and type(child.fc1) is nn.Linear and wanted(name, child.fc1):
            setattr(module, name, PackedMLP(child))
        elif type(child) is nn.Linear and wanted(name, child):
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            _prepack(child, wanted)
            continue
        del child
        return_freed_memory()


def prepack_for_decoding(decoder: nn.Module, *, rows: int) -> None:
    """Packs the weights that decode steps use on a CPU: linear layers of all blocks, and the head. Results stay equal.

    For several rows, packed layers halve the time. For one row in float32 they lose to plain layers where MKL has code
    of its own for the processor, and elsewhere, if layers are small, to weights laid out input-major.

    Args:
        rows: Typical number of texts decoded at once, beams included.
    """
    if "head" in vars(decoder):  # stored in 8 bits, or packed before
        return
    head: Head = decoder.head_parts  # type: ignore[assignment]
    weight = head.weight
    if weight.device.type != "cpu":
        return
    alone = rows == 1 and weight.dtype == torch.float32
    if _can_pack(weight) and not (alone and (_reads_rows_fast() or weight.shape[1] < WIDE)):
        prepack(decoder)
        if rows == 1 and weight.dtype != torch.float32:
            return  # the head's weight, often the embedding's too, is then not copied, and its product is no slower
        product = PackedLinear(weight, head.bias).function()
        decoder.head = lambda hidden: product(head.transformed(hidden))  # type: ignore[assignment]
        return
    prepack(decoder, lambda name, layer: name == "kv")  # products of the context have many rows
    if not _reads_rows_fast():
        _lay_out_input_major(decoder)


def _can_pack(weight: Tensor) -> bool:
    """Returns True if torch can pack this weight on this processor."""
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and packs(weight.dtype)


def _reads_rows_fast() -> bool:
    """Returns True if plain products of one row in float32 are the fastest: MKL's code for AVX-512.

    MKL runs that code on Intel's processors alone, so torch is asked whose it is. Milliseconds of a step's products on
    two cores of a Xeon, by benchmarks/products.py:

        |         | plain | input-major | packed |
        |---------|-------|-------------|--------|
        | M       |   8.7 |        11.0 |   11.7 |
        | SmolLM2 |  62.0 |        68.6 |   72.6 |
        | GPT-2   |  40.2 |        47.6 |   57.5 |
    """
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_f")) and "Intel" in known.get("cpu_name", "")


@cache
def packs(dtype: torch.dtype) -> bool:
    """Returns True if oneDNN packs weights of this type: it refuses bfloat16 on processors with AVX2 only."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(FEW_ROWS, FEW_ROWS, dtype=dtype), FEW_ROWS)
    except (AttributeError, RuntimeError):  # built without the operator, or refused by oneDNN
        return False
    return True


def _lay_out_input_major(decoder: nn.Module) -> None:
    """Stores layers with more outputs than inputs, and embeddings, so that a product of one row reads them in order.

    It takes 0.3 to 0.9 of the time (MKL). Other layers are faster as they are.
    """
    for layer in decoder.modules():
        if isinstance(layer, nn.Linear | nn.Embedding) and layer.weight.shape[0] >= layer.weight.shape[1]:
            layer.weight.data = layer.weight.data.t().contiguous().t()
