"""Output heads of language models other than the plain token embedding."""

from typing import Annotated

import torch
from torch import Tensor, nn

from vlm.errors import Count, Injected, Range
from vlm.nn.blocks import ACTIVATIONS, GATES, Activation
from vlm.nn.vocabulary_loss import Head


class VocabularyHead(nn.Module):
    """Maps hidden states to logits: a transform or factor, a matrix (tied to the token embedding or not), a bias.

    The heads of BERT (Devlin et al. 2019) and BLIP have a transform, a tied matrix and a bias; GIT and Llama an untied
    matrix; T5 a factor and a tied matrix.

    Args:
        dim: Width D.
        vocab_size: Size V of the tokenizer's vocabulary.
        tied: Whether the matrix is the token embedding (Press and Wolf 2017).
        bias: Whether to add a bias per token.
        transform: Activation of a leading linear layer of width D with a norm; None for no transform.
        norm_eps: Epsilon of that norm.
        scale: Factor of the hidden states.
    Shapes:
        hidden (..., D) -> logits (..., V)
    """

    def __init__(
        self,
        *,
        dim: Count,
        vocab_size: Injected[int],
        tied: bool = True,
        bias: bool = False,
        transform: Activation | None = None,
        norm_eps: float = 1e-5,
        scale: Annotated[float, Range(above=0)] = 1.0,
    ) -> None:
        super().__init__()
        if transform in GATES:
            raise ValueError(f"transform={transform} is not supported; choose one of {', '.join(ACTIVATIONS)}")
        self.own = None if tied else nn.Linear(dim, vocab_size, bias=bias)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if tied and bias else None
        self.scale = scale
        self.activation = None if transform is None else ACTIVATIONS[transform]
        if transform is not None:
            self.dense, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim, eps=norm_eps)

    def parts(self, embedding: Tensor) -> Head:
        """Weights and transform of the head, for the loss; the token embedding is (V, D)."""
        weight, bias = (embedding, self.bias) if self.own is None else (self.own.weight, self.own.bias)
        return Head(weight, bias, self._transform if self.activation is not None or self.scale != 1 else None)

    @property
    def transform_flop(self) -> int:
        """Operations of the transform per position."""
        return 0 if self.activation is None else 2 * self.dense.weight.numel()

    def _transform(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.activation is None else self.norm(self.activation(self.dense(hidden)))
        return hidden if self.scale == 1 else hidden * self.scale
