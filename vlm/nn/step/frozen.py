"""Frozen layers in training on a CPU, computed by oneDNN in float32."""

from typing import Any

import torch
from torch import Tensor, nn

from vlm.nn.blocks import MLP
from vlm.nn.step.packed import FUSED, packs, replace_in_blocks


class FrozenLinear(nn.Linear):
    """A linear layer without trained parameters, computed by oneDNN in float32 on a CPU.

    Its parameters are those of the layer, under the same names.

    Args:
        layer: The layer.
    Shapes:
        x (..., in) -> (..., out)
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        return _FrozenProduct.apply(x, self.weight, self.bias)


class _FrozenProduct(torch.autograd.Function):
    """A product with a frozen weight; only its input may get a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return torch.ops.mkldnn._linear_pointwise.default(grads[0], weight.t(), None, "none", [], ""), None, None


class FrozenMLP(MLP):
    """An MLP of frozen layers whose activation, one of FUSED, is computed inside the first product.

    Shapes:
        x (B, L, D) -> (B, L, D)
    """

    def __init__(self, mlp: MLP) -> None:
        nn.Module.__init__(self)
        self.activation = mlp.activation
        self.fc1, self.fc2 = FrozenLinear(mlp.fc1), FrozenLinear(mlp.fc2)

    def forward(self, x: Tensor) -> Tensor:
        needs_gradient = x.requires_grad and torch.is_grad_enabled()  # which an activation inside a product has not
        if needs_gradient or x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        (name, algorithm), layer = FUSED[self.activation], self.fc1
        x = torch.ops.mkldnn._linear_pointwise.default(x, layer.weight, layer.bias, name, [], algorithm)
        return self.fc2(x)


def fuse_frozen_layers(model: nn.Module) -> None:
    """Arranges the frozen linear layers and MLPs of a model's blocks for training on a CPU, if torch has oneDNN.

    In float32, oneDNN adds biases and computes activations inside its products, and on processors of AMD its products
    are faster than those of MKL. Results change by rounding.
    """

    def is_frozen(module: nn.Module) -> bool:
        return not any(parameter.requires_grad for parameter in module.parameters())

    def replace(name: str, layer: Any) -> nn.Module | None:
        if type(layer) is MLP and layer.activation in FUSED and is_frozen(layer):
            return FrozenMLP(layer)
        return FrozenLinear(layer) if type(layer) is nn.Linear and is_frozen(layer) else None

    if packs(torch.float32):
        replace_in_blocks(model, replace)
