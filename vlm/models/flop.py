"""How many floating-point operations a training step of a model is, counted from its sizes.

Only matrix products count, a multiplication and an addition each, as in the count that model FLOP utilisation is
defined by (Chowdhery et al. 2022, "PaLM", appendix B): what a model has to compute, whatever a program does beside it.
Attention counts whole, also where a mask hides half of it, and the backward pass counts twice the forward one. A model
states its own count in a method `flop`; an encoder that states none is measured.
"""

from dataclasses import dataclass, replace
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from vlm.models.context import Context
from vlm.models.frozen_features import frozen_part
from vlm.nn.attention import CrossAttention, SelfAttention


@dataclass(frozen=True)
class Work:
    """What a batch is to a model.

    Args:
        images: Images that are encoded.
        rows: Rows of text, B.
        length: Tokens of a row, L, padding included.
        read: Tokens of the text that is encoded for a row, S, padding included; 0 where it is no text.
        kept: Whether the features of the images were kept, and are only projected, if that.
    """

    images: int = 0
    rows: int = 0
    length: int = 0
    read: int = 0
    kept: bool = False


@dataclass(frozen=True, kw_only=True)
class Flop:
    """Operations of a model, by the piece of work that takes them.

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
        return work.rows * work.read * (self.read_token + work.read * self.read_pair)


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


def encoder_flop(encoder: nn.Module, image_size: int) -> Flop:
    """The operations of encoding an image, as the encoder states them or as torch counts them."""
    if isinstance(encoder, Counted):
        flop = encoder.flop(image_size)
    else:
        count, context = measured(encoder, image_size)
        flop = Flop(image=count, states=cast(Context, context).states.shape[1])
    learned = flop.image if learns(frozen_part(encoder)) else flop.projection if learns(encoder) else 0
    return replace(flop, learned=learned)


def learns(part: nn.Module) -> bool:
    """True for a module that has a backward pass."""
    return any(parameter.requires_grad for parameter in part.parameters())


def cross_flop(attn: CrossAttention) -> tuple[int, int, int]:
    """Operations of cross-attention: for each token, each state of the context, and each pair of both."""
    token = 2 * (attn.q.weight.numel() + attn.proj.weight.numel())
    return token, 2 * attn.kv.weight.numel(), _mixing(attn)


def measured(module: nn.Module, image_size: int) -> tuple[int, Tensor | Context]:
    """Operations of a module that reads one image, as torch counts them, and what it gives; nothing is computed."""
    from torch.utils.flop_counter import FlopCounterMode  # which using a model does not need

    tensors = {name: t.detach().to("meta") for name, t in [*module.named_parameters(), *module.named_buffers()]}
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            image = torch.empty(1, 3, image_size, image_size, device="meta")
            given = torch.func.functional_call(module, tensors, (image,))
    finally:
        for part, training in modes:  # each its own: a frozen part of a module that learns does not train
            part.training = training
    return counter.get_total_flops(), given


def block_flop(block: nn.Module) -> tuple[int, int]:
    """Operations of a block's self-attention and MLP: for each token, and for each pair of a query and a key."""
    attn = cast(SelfAttention, block.attn)
    return linear_flop(attn) + linear_flop(cast(nn.Module, block.mlp)), _mixing(attn)


def linear_flop(module: nn.Module | None) -> int:
    """Operations of all linear layers of a module, for each token."""
    layers = [] if module is None else [part for part in module.modules() if isinstance(part, nn.Linear)]
    return 2 * sum(layer.weight.numel() for layer in layers)


def _mixing(attn: SelfAttention | CrossAttention) -> int:
    """Of a pair in all heads: the product of query and key, and that of its weight with the value."""
    return 4 * attn.num_heads * attn.head_dim
