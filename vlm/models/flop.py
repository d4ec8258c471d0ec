"""Floating-point operations of a training step, counted by torch on tensors without values.

Only matrix products count, a multiplication and an addition each, as in the count that model FLOP utilisation is
defined by (Chowdhery et al. 2022, "PaLM", appendix B): the model's own work, whatever a program does beside it.
Attention counts whole, also where a mask hides half of it, and the backward pass counts twice the forward one. A model
states its operations in a method `flop`.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from vlm.models.context import Context
from vlm.models.frozen_features import frozen_part, projects


@dataclass(frozen=True)
class Work:
    """Size of a batch.

    Args:
        images: Images that are encoded.
        rows: Rows of text, B.
        length: Tokens of a row, L, padding included.
        kept: Whether the features of the images were kept, and are only projected, if that.
    """

    images: int = 0
    rows: int = 0
    length: int = 0
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Flop:
    """Operations of a model.

    Args:
        image: Of encoding an image; `projection`: of projecting its kept features; `learned`: of those of an image, the
            ones that have a backward pass: none has below what learns.
        row, token, pair: Of a row of text, of each of its tokens, and of each pair of its tokens.
        pool: Of pooling an image's states.
        head: Of a position that goes through the head.
    """

    image: int = 0
    projection: int = 0
    learned: int = 0
    row: int = 0
    token: int = 0
    pair: int = 0
    pool: int = 0
    head: int = 0

    def __add__(self, other: "Flop") -> "Flop":
        return Flop(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})

    def forward(self, work: Work, predicted: float) -> dict[str, float]:
        """Operations of a forward pass, by part of the model.

        Args:
            predicted: Positions that go through the head: tokens, or images of a classifier.
        """
        length = work.length
        text = work.rows * (self.row + length * (self.token + length * self.pair))
        return {
            "encoder": float(work.images * (self.projection if work.kept else self.image)),
            "decoder": float(text + work.images * self.pool),
            "head": float(predicted * self.head),
        }

    def training(self, work: Work, predicted: float) -> float:
        """Operations of a training step's forward and backward passes."""
        parts = self.forward(work, predicted)
        encoder = parts["encoder"] + 2 * work.images * self.learned
        return encoder + 3 * (parts["decoder"] + parts["head"])


@runtime_checkable
class Counted(Protocol):
    """A module that states its operations."""

    def flop(self, image_size: int) -> Flop:
        """Operations for images of so many pixels a side; 0 where it reads none."""


def model_flop(model: nn.Module, *, image_size: int = 0) -> Flop:
    """The operations of a model, asked before it is sharded.

    Raises:
        TypeError: The model does not state them.
    """
    if not isinstance(model, Counted):
        raise TypeError(f"the operations of a {type(model).__name__} are not counted: it has no method flop")
    return model.flop(image_size)


def encoder_flop(encoder: Any, image_size: int) -> tuple[Flop, Context]:
    """The operations of encoding an image, and its context without values."""
    image = torch.empty(1, 3, image_size, image_size, device="meta")
    count, context = measured(encoder, image)
    kept = measured(encoder, image, method="features")[0] if projects(encoder) else count
    learned = count if _learns(frozen_part(encoder)) else count - kept if _learns(encoder) else 0
    return Flop(image=count, projection=count - kept, learned=learned), context


def decoder_flop(decoder: nn.Module, context: Context | None = None) -> Flop:
    """The operations of a row of text beside one context.

    They are a polynomial of the second degree in the number of tokens, which three numbers of them determine.
    """
    tokens = torch.empty(1, 3, dtype=torch.long, device="meta")
    one, two, three = (measured(decoder, tokens[:, :length], None, context)[0] for length in (1, 2, 3))
    pair = (three - 2 * two + one) // 2
    token = two - one - 3 * pair
    return Flop(row=one - token - pair, token=token, pair=pair)


def measured(module: nn.Module, *args: Any, method: str = "__call__") -> tuple[int, Any]:
    """Operations of a call as torch counts them, and its result; nothing is computed.

    Args:
        args: Tensors on the device "meta"; the module's own weights stay where they are.
        method: The method that is called.
    """
    from torch.utils.flop_counter import FlopCounterMode  # which using a model does not need

    held = [*module.named_parameters(), *module.named_buffers()]
    tensors = {f"module.{name}": tensor.detach().to("meta") for name, tensor in held}
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            result = torch.func.functional_call(_Call(module, method), tensors, args)
    finally:
        for part, training in modes:  # each its own: a frozen part of a module that learns does not train
            part.training = training
    return counter.get_total_flops(), result


class _Call(nn.Module):
    """A call of a module's method as a forward pass, in which the module's weights can be replaced."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *args: Any) -> Any:
        return getattr(self.module, self.method)(*args)


def _learns(part: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in part.parameters())
