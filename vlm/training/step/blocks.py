"""Blocks of a model in training: compiled, or with their activations computed anew in the backward pass.

Both replace a block's `forward` and nothing else: no module is wrapped, so that weights keep their names, and the hooks
of strategies on a block (gathering its weights, reducing its gradients) stay outside.
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
    """The blocks of a model, outer ones first where some stand in others."""
    for name, stack in model.named_modules():
        if name.rpartition(".")[2] in STACKS and isinstance(stack, nn.ModuleList | nn.Sequential):
            yield from stack


def arrange(model: nn.Module, *, recompute: bool, compiled: Callable[[Any], Any] | None = None) -> None:
    """Sets how training runs each block of a model; before a strategy takes the model.

    Args:
        recompute: Whether only a block's input is kept for the backward pass, which computes the rest once more (Chen
            et al. 2016), with the same dropout. Blocks with batch norms are left out: statistics would count twice.
        compiled: Compiles a function; None to run blocks as they are.
    """
    every = list(blocks(model))
    ways: dict[Any, Any] = {}  # a way a class: blocks alike share their code
    for block in every:
        if any(inner in every for inner in block.modules() if inner is not block):
            continue
        if isinstance(block, nn.RNNBase):  # one kernel as it is, and packed texts cannot be compiled
            continue
        plain = type(block).forward
        if compiled and plain not in ways:
            ways[plain] = compiled(plain)
        again = recompute and not any(isinstance(part, _BatchNorm) for part in block.modules())
        if compiled or again:
            block.forward = _Arranged(block, plain, ways.get(plain, plain), again)


class _Arranged:
    """A block's forward pass in training; without gradients, it is the block's own.

    An object and no closure, so that a copy of the block runs itself and not the block that it was copied from.
    """

    def __init__(self, block: nn.Module, plain: Callable[..., Any], way: Callable[..., Any], recompute: bool) -> None:
        self.block, self.plain, self.way, self.recompute = block, plain, way, recompute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(self.block, *args, **kwargs)
        if self.recompute:
            return checkpoint(self.way, self.block, *args, use_reentrant=False, context_fn=same_kernels, **kwargs)
        return self.way(self.block, *args, **kwargs)
