"""Heads of decoders and of masked language models that are more than the embedding of tokens."""

import torch
from torch import Tensor, nn

from vlm.errors import Count, Injected
from vlm.nn.blocks import ACTIVATIONS, Activation
from vlm.nn.vocabulary_loss import Head


class VocabularyHead(nn.Module):
    """Hidden states to logits: a transform, a matrix of its own or the embedding of tokens, and a bias.

    BERT's (Devlin et al. 2019) and BLIP's have a transform and a bias over the embedding, GIT's and Llama's a matrix.

    Args:
        dim: Width D.
        vocab_size: Size V of the tokenizer's vocabulary.
        tied: Whether the matrix is the embedding of tokens (Press and Wolf 2017).
        bias: Whether each token has a bias.
        transform: Activation between a linear layer of width D and a norm that come first; None for neither.
        norm_eps: Added to the variance in that norm.
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
    ) -> None:
        super().__init__()
        if transform == "swiglu":
            raise ValueError("transform swiglu is no function of one layer; choose relu, gelu, gelu_tanh or quick_gelu")
        self.own = None if tied else nn.Linear(dim, vocab_size, bias=bias)
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if tied and bias else None
        self.activation = None if transform is None else ACTIVATIONS[transform]
        if transform is not None:
            self.dense, self.norm = nn.Linear(dim, dim), nn.LayerNorm(dim, eps=norm_eps)

    def parts(self, embedding: Tensor) -> Head:
        """The head as the loss takes it; the embedding of tokens is (V, D)."""
        weight, bias = (embedding, self.bias) if self.own is None else (self.own.weight, self.own.bias)
        return Head(weight, bias, None if self.activation is None else self._transform)

    @property
    def transform_flop(self) -> int:
        """Operations of the transform, for a position."""
        return 0 if self.activation is None else 2 * self.dense.weight.numel()

    def _transform(self, hidden: Tensor) -> Tensor:
        assert self.activation is not None
        return self.norm(self.activation(self.dense(hidden)))
