"""Linear layers with 8-bit weights, for inference on a CPU."""

import warnings
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from vlm.nn.blocks import Block
from vlm.tuning import return_freed_memory

Product = Callable[[Tensor], Tensor]
WEIGHT = 127  # largest quantised weight
TINY = 1e-30  # minimum scale, for rows of zeros


class Int8Linear(nn.Module):
    """A linear layer that multiplies 8-bit integers: W8A8 with vector-wise scales (Dettmers et al. 2022, 2.1).

    Each output has a scale for its weights. Inputs are quantised on the fly, with a scale per row, so that a row's
    result does not depend on other rows. Sums of the integers are exact.

    Args:
        weight: (out, in), on the CPU.
        bias: (out,) or None.
    Shapes:
        x (..., in), float32 -> (..., out)
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach().float()
        scale = weight.abs().amax(1).clamp_min(TINY) / WEIGHT  # (out,)
        self.weight = _packed((weight / scale[:, None]).round().to(torch.int8), scale)
        self.bias = None if bias is None else bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        return self.function()(x)

    def function(self) -> Product:
        """The layer as a plain function, without the overhead of modules."""
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
        weight, bias, level = self.weight, self.bias, levels()

        def multiply(x: Tensor) -> Tensor:
            size = x.abs().amax(-1, keepdim=True).clamp_min_(TINY)  # (..., 1)
            y = product(x / size, 1 / level, level + 1, weight)
            return y.mul_(size) if bias is None else torch.addcmul(bias, y, size)

        return multiply


def _packed(weight: Tensor, scale: Tensor) -> Any:
    """FBGEMM's layout of a weight: int8 (out, in), scale (out,)."""
    zero = torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():  # torch deprecates its quantised tensors, but offers no other way yet
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zero, 0)
    return torch.ops.quantized.linear_prepack(quantized, None)


@cache
def is_supported() -> bool:
    """Returns True if torch runs the int8 product on this processor; on ARM, its list of engines is not reliable."""
    try:
        Int8Linear(torch.eye(2), None)(torch.eye(2))
    except RuntimeError:
        return False
    return True


@cache
def levels() -> int:
    """The largest absolute value that inputs are quantised to.

    On processors without VNNI, FBGEMM adds pairs of products in 16 bits, and saturates sums above 32,767. Inputs of 7
    bits stay below: 2 * 127 * 127 = 32,258, with the input stored as 1 to 127.
    """
    return 127 if torch.cpu.get_capabilities().get("avx512_vnni", False) else 63


def quantize(model: nn.Module, decoders: Iterable[Any]) -> int:
    """Quantises the linear layers of a model's blocks and the heads of its decoders to 8 bits; returns their number.

    A decoder's embedding is unchanged, even if the head shares it.
    """
    count = 0
    for decoder in decoders:
        head = decoder.head_parts
        product = Int8Linear(head.weight, head.bias).function()
        decoder.head = lambda hidden, head=head, product=product: product(head.transformed(hidden))
        count += 1
    return count + sum(_quantize(block) for block in [one for one in model.modules() if isinstance(one, Block)])


def _quantize(module: nn.Module) -> int:
    count = 0
    for name in [name for name, _ in module.named_children()]:
        child: Any = module.get_submodule(name)  # the only reference to a layer, which is freed as it is replaced
        if type(child) is nn.Linear:
            setattr(module, name, Int8Linear(child.weight, child.bias))
            count += 1
            del child
            return_freed_memory()
        else:
            count += _quantize(child)
    return count
