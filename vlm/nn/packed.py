"""Weights laid out for decoding on a CPU, whose products have as many rows as there are texts: few."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FEW_ROWS = 8  # what a layout is chosen for; it serves fewer and more as well


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in the blocks that oneDNN's inner products read (for inference only).

    The products of a decode step have as many rows as there are texts. A library that takes weights as they come copies
    them into blocks at each call, which is most of the time of a product of 8 rows.

    Args:
        weight: (out, in), on the CPU.
        bias: (out,) or None.
    Shapes:
        x (..., in) -> (..., out)
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # The way by which torch's own compiler lays out frozen weights; layers of torch.utils.mkldnn cannot take
        # tensors as they are.
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), FEW_ROWS)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.function()(x)

    def function(self) -> Callable[[Tensor], Tensor]:
        """What the layer computes, without the machinery of modules."""
        product, weight, bias = torch.ops.mkldnn._linear_pointwise.default, self.weight, self.bias
        return lambda x: product(x, weight, bias, "none", [], "")


def lay_out_for_decoding(decoder: nn.Module, *, rows: int) -> None:
    """Lays out what a decode step multiplies by: the linear layers of each block, and the head. Values stay.

    For several rows, oneDNN's blocks take half the time; for one row in float32, its calls cost more than they save.
    The keys and values of the context are products of many rows, for which weights are best left as they are.

    Args:
        rows: Texts that are mostly decoded at once, beams counted.
    """
    embed: Any = decoder.token_embed
    if embed.weight.device.type != "cpu":
        return
    if not _can_pack(embed.weight) or (rows == 1 and embed.weight.dtype == torch.float32):
        _lay_out_input_major(decoder)
        return
    for name, layer in list(decoder.named_modules()):
        if type(layer) is nn.Linear and not name.endswith("cross_attn.kv"):
            parent, _, own = name.rpartition(".")
            setattr(decoder.get_submodule(parent), own, PackedLinear(layer.weight, layer.bias))
    decoder.head = PackedLinear(embed.weight, None).function()  # type: ignore[assignment]


def _can_pack(weight: Tensor) -> bool:
    """Whether this build of torch lays such a weight out."""
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return known and weight.dtype in (torch.float32, torch.bfloat16)


def _lay_out_input_major(decoder: nn.Module) -> None:
    """Stores widening layers and embeddings so that a product of one row reads them in order.

    That takes 0.3 to 0.9 of the time (MKL); narrowing layers are faster as they are.
    """
    for layer in decoder.modules():
        if isinstance(layer, nn.Linear | nn.Embedding) and layer.weight.shape[0] >= layer.weight.shape[1]:
            layer.weight.data = layer.weight.data.t().contiguous().t()
