"""Floating-point operations of a training step, counted by torch on meta tensors.

Only matrix products count, with one multiplication and one addition each, as in the definition of model FLOP
utilisation (Chowdhery et al. 2022, "PaLM", appendix B). Attention counts in full, even where a mask hides half of it.
The backward pass counts twice the forward pass. A model states its operations in a method `flop`.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from vlm.models.context import Context, frozen_part
from vlm.nn.image_size import ImageSize, sides


@dataclass(frozen=True)
class Work:
    """Size of a batch.

    Args:
        images: Number of images to encode.
        rows: Number B of rows of text.
        length: Number L of tokens per row, padding included.
        read: Number S of tokens of the encoded text per row, padding included; 0 if no text is encoded.
        packed: Number and length of the packed rows of encoded texts; None if each row holds one text of S tokens.
        cached: Whether image features are cached, so that at most a projection is computed.
    """

    images: int = 0
    rows: int = 0
    length: int = 0
    read: int = 0
    packed: tuple[int, int] | None = None
    cached: bool = False


@dataclass(frozen=True, kw_only=True)
class Flop:
    """Operations of a model, per unit of its inputs.

    Args:
        image: To encode an image. `projection`: to project its cached features. `learned`: the part of an image's
            operations that has a backward pass.
        states: Number of states of an image; a text has one per token.
        read_token, read_pair: Per token of an encoded text, and per pair of tokens.
        read_learns: Whether the text encoder has a backward pass.
        token, pair: Per token, and per pair of tokens in a row.
        state, context_pair: Per context state, and per pair of a state and a token.
        state_pair: Per pair of context states.
        pool: To pool the states of an image.
        head: Per position that the head is applied to.
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
            predicted: Number of positions that the head is applied to: tokens, or images for a classifier.
        """
        tokens, states = work.rows * work.length, self.states + work.read
        text = tokens * (self.token + work.length * self.pair + states * self.context_pair)
        inputs = work.images * self.states + work.rows * work.read if work.rows else 0
        context = inputs * (self.state + states * self.state_pair)
        return {
            "encoder": float(work.images * (self.projection if work.cached else self.image) + self._source_flop(work)),
            "decoder": float(text + context + work.images * self.pool),
            "head": float(predicted * self.head),
        }

    def training(self, work: Work, predicted: float) -> float:
        """Operations of a training step's forward and backward passes."""
        parts = self.forward(work, predicted)
        learned = work.images * self.learned + (self._source_flop(work) if self.read_learns else 0)
        return parts["encoder"] + 2 * learned + 3 * (parts["decoder"] + parts["head"])

    def _source_flop(self, work: Work) -> int:
        """Operations of encoding texts."""
        rows, length = work.packed or (work.rows, work.read)
        return rows * length * (self.read_token + length * self.read_pair)


@runtime_checkable
class SupportsFlop(Protocol):
    """A module that counts its operations."""

    def flop(self, image_size: ImageSize) -> Flop:
        """Operations for images of a size; 0 if the module reads none."""


def model_flop(model: nn.Module, *, image_size: ImageSize = 0) -> Flop:
    """Operations of a model. Call it before the model is sharded.

    Raises:
        TypeError: The model has no method `flop`.
    """
    if not isinstance(model, SupportsFlop):
        raise TypeError(f"cannot count the operations of {type(model).__name__}: it has no method flop")
    return model.flop(image_size)


def encoder_flop(encoder: Any, image_size: ImageSize) -> tuple[Flop, Context]:
    """Operations of encoding an image (or the images of one record), and the resulting context on "meta"."""
    image = torch.empty(1, getattr(encoder, "count", 1), 3, *sides(image_size), device="meta").squeeze(1)
    count, context = count_flop(encoder, image)
    part = frozen_part(encoder)
    cached = count if part is encoder else count_flop(encoder, image, method="features")[0]
    trained = count if is_trainable(part) else count - cached
    return Flop(image=count, projection=count - cached, learned=trained, states=context.states.shape[1]), context


def decoder_flop(decoder: nn.Module, context_dim: int | None = None) -> Flop:
    """Operations of decoding a row of text, with context states of a given width.

    They are a polynomial in the numbers of tokens L and of states S, fitted with a few small sizes:
    token * L + pair * L * L + state * S + state_pair * S * S + context_pair * L * S
    """

    def count(length: int, states: int) -> int:
        context = None if context_dim is None else Context(torch.empty(1, states, context_dim, device="meta"))
        return count_flop(decoder, token_ids(length), None, context)[0]

    base, longer, wider = count(1, 1), count(2, 1), count(1, 2)
    pair, state_pair = (count(3, 1) - 2 * longer + base) // 2, (count(1, 3) - 2 * wider + base) // 2
    context_pair = count(2, 2) - longer - wider + base
    token, state = longer - base - 3 * pair - context_pair, wider - base - 3 * state_pair - context_pair
    return Flop(token=token, pair=pair, state=state, state_pair=state_pair, context_pair=context_pair)


def token_ids(length: int) -> Tensor:
    return torch.empty(1, length, dtype=torch.long, device="meta")


def count_flop(module: nn.Module, *args: Any, method: str = "__call__") -> tuple[int, Any]:
    """Returns the operations of a call, as torch counts them on "meta", and its result.

    Args:
        args: Tensors on the device "meta"; the module's weights are not moved.
        method: Name of the method to call.
    """
    from torch.utils.flop_counter import FlopCounterMode  # not needed for inference

    held = [*module.named_parameters(), *module.named_buffers()]
    tensors = {f"module.{name}": tensor.detach().to("meta") for name, tensor in held}
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            result = torch.func.functional_call(_Call(module, method), tensors, args)
    finally:
        for part, training in modes:  # part by part, because frozen parts stay in evaluation mode
            part.training = training
    return counter.get_total_flops(), result


class _Call(nn.Module):
    """Wraps a method of a module as a forward pass, for functional_call."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *args: Any) -> Any:
        return getattr(self.module, self.method)(*args)


def is_trainable(part: nn.Module) -> bool:
    """Returns True if a module has trainable parameters."""
    return any(parameter.requires_grad for parameter in part.parameters())
