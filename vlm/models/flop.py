"""Floating-point operations of a training step, counted by torch on tensors without values.

Only matrix products count, a multiplication and an addition each, as in the count that model FLOP utilisation is
defined by (Chowdhery et al. 2022, "PaLM", appendix B): the model's own work, whatever a program does beside it.
Attention counts whole, also where a mask hides half of it, and the backward pass counts twice the forward one. A model
states its operations in a method `flop`.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vlm.models.context import Context
from vlm.models.frozen_features import frozen_part, projects


@dataclass(frozen=True)
class Work:
    """Size of a batch.

    Args:
        images: Images that are encoded.
        rows: Rows of text, B.
        length: Tokens of a row, L, padding included.
        read: Tokens of the text that is encoded for a row, S, padding included; 0 where it is no text.
        packed: Number and length of the rows in which these texts are encoded; None for a row of S tokens each.
        kept: Whether the features of the images were kept, and are only projected, if that.
    """

    images: int = 0
    rows: int = 0
    length: int = 0
    read: int = 0
    packed: tuple[int, int] | None = None
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Flop:
    """Operations of a model.

    Args:
        image: Of encoding an image; `projection`: of projecting its kept features; `learned`: of those of an image, the
            ones that have a backward pass: none has below what learns.
        states: States that an image becomes; a text becomes as many as it has tokens.
        read_token, read_pair: Of a token of a text that is encoded, and of a pair of them.
        read_learns: Whether the encoder of texts has a backward pass.
        token, pair: Of a token, and of a pair of tokens of a row.
        state, context_pair: Of a state of the context, and of its pair with a token.
        state_pair: Of a pair of states of the context.
        pool: Of pooling an image's states.
        head: Of a position that goes through the head.
    """

    image: int = 0
    projection: int = 0
    learned: int = 0
    states: int = 0
    read_token: int = 0
    read_pair: int = 0
    read_learns: bool = False
    token: int = 0
    pair: int = 0
    state: int = 0
    context_pair: int = 0
    state_pair: int = 0
    pool: int = 0
    head: int = 0

    def __add__(self, other: "Flop") -> "Flop":
        return Flop(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})

    def forward(self, work: Work, predicted: float) -> dict[str, float]:
        """Operations of a forward pass, by part of the model.

        Args:
            predicted: Positions that go through the head: tokens, or images of a classifier.
        """
        tokens, states = work.rows * work.length, self.states + work.read
        text = tokens * (self.token + work.length * self.pair + states * self.context_pair)
        inputs = work.images * self.states + work.rows * work.read if work.rows else 0
        context = inputs * (self.state + states * self.state_pair)
        return {
            "encoder": float(work.images * (self.projection if work.kept else self.image) + self._reading(work)),
            "decoder": float(text + context + work.images * self.pool),
            "head": float(predicted * self.head),
        }

    def training(self, work: Work, predicted: float) -> float:
        """Operations of a training step's forward and backward passes."""
        parts = self.forward(work, predicted)
        learned = work.images * self.learned + (self._reading(work) if self.read_learns else 0)
        return parts["encoder"] + 2 * learned + 3 * (parts["decoder"] + parts["head"])

    def _reading(self, work: Work) -> int:
        """Operations of encoding texts."""
        rows, length = work.packed or (work.rows, work.read)
        return rows * length * (self.read_token + length * self.read_pair)


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
    """The operations of encoding an image, or the several of a record, and its context without values."""
    image = torch.empty(1, getattr(encoder, "count", 1), 3, image_size, image_size, device="meta").squeeze(1)
    count, context = measured(encoder, image)
    kept = measured(encoder, image, method="features")[0] if projects(encoder) else count
    learned = count if learns(frozen_part(encoder)) else count - kept if learns(encoder) else 0
    return Flop(image=count, projection=count - kept, learned=learned, states=context.states.shape[1]), context


def text_flop(encoder: nn.Module) -> tuple[int, int]:
    """The operations of encoding a text: of each token, and of each pair of tokens."""
    one, two = (measured(encoder, _tokens(length))[0] for length in (1, 2))
    pair = (two - 2 * one) // 2
    return one - pair, pair


def decoder_flop(decoder: nn.Module, context_dim: int | None = None) -> Flop:
    """The operations of a row of text, beside states of a context of a width.

    They are a polynomial in the numbers of tokens L and of states S, which a few small ones determine:
    token * L + pair * L * L + state * S + state_pair * S * S + context_pair * L * S
    """

    def count(length: int, states: int) -> int:
        context = None if context_dim is None else Context(torch.empty(1, states, context_dim, device="meta"))
        return measured(decoder, _tokens(length), None, context)[0]

    one, longer, wider = count(1, 1), count(2, 1), count(1, 2)
    pair, state_pair = (count(3, 1) - 2 * longer + one) // 2, (count(1, 3) - 2 * wider + one) // 2
    context_pair = count(2, 2) - longer - wider + one
    token, state = longer - one - 3 * pair - context_pair, wider - one - 3 * state_pair - context_pair
    return Flop(token=token, pair=pair, state=state, state_pair=state_pair, context_pair=context_pair)


def _tokens(length: int) -> Tensor:
    return torch.empty(1, length, dtype=torch.long, device="meta")


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


def learns(part: nn.Module) -> bool:
    """True for a module that has a backward pass."""
    return any(parameter.requires_grad for parameter in part.parameters())
