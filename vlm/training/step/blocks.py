"""Blocks of a model in training: compiled, or with activations recomputed in the backward pass.

Both replace only a block's `forward`. No module is wrapped, so that weights keep their names, and the hooks that
strategies put on a block (to gather its weights, to reduce its gradients) stay outside.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from vlm.nn.attention import same_kernels

STACKS = ("blocks", "layers", "stages")  # attributes that hold the blocks of a model, by our names and timm's


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the blocks of a model, outer ones before those inside them."""
    for name, stack in model.named_modules():
        if name.rpartition(".")[2] in STACKS and isinstance(stack, nn.ModuleList | nn.Sequential):
            yield from stack


def arrange(model: nn.Module, *, recompute: bool, compiled: Callable[[Any], Any] | None = None) -> None:
    """Sets how training runs each block of a model; before a strategy takes the model.

    Args:
        recompute: Whether to keep only a block's input for the backward pass, which recomputes the rest with the same
            dropout (Chen et al. 2016). Blocks with batch norms are left out: their statistics would be updated twice.
        compiled: Compiles a function; None to run blocks as they are.
    """
    every = list(blocks(model))
    ways: dict[Any, Any] = {}  # one per class, so that equal blocks share compiled code
    for block in every:
        if any(inner in every for inner in block.modules() if inner is not block):
            continue
        if isinstance(block, nn.RNNBase):  # already one kernel, and packed sequences cannot be compiled
            continue
        plain = type(block).forward
        if compiled and plain not in ways:
            ways[plain] = compiled(plain)
        again = recompute and not any(isinstance(part, _BatchNorm) for part in block.modules())
        if compiled or again:
            block.forward = _Arranged(block, plain, ways.get(plain, plain), again)


class _Arranged:
    """A block's forward pass in training; without gradients, it is the block's own.

    An object instead of a closure, so that a deep copy of a block runs itself and not the original.
    """

    def __init__(self, block: nn.Module, plain: Callable[..., Any], way: Callable[..., Any], recompute: bool) -> None:
        self.block, self.plain, self.way, self.recompute = block, plain, way, recompute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(self.block, *args, **kwargs)
        if self.recompute:
            return checkpoint(self.way, self.block, *args, use_reentrant=False, context_fn=same_kernels, **kwargs)
        return self.way(self.block, *args, **kwargs)
