"""Recurrent encoders and decoders, the predecessors of transformers."""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from vlm.errors import Count, Injected, Rate
from vlm.models.context import Context
from vlm.models.flop import Flop
from vlm.models.heads import VocabularyHead
from vlm.models.text_decoder import HiddenStateDecoder
from vlm.nn.dropout import Dropout
from vlm.nn.image_size import ImageSize
from vlm.nn.recurrent import LAYERS, Cell, ScaledEmbedding, open_forget_gates, reversed_texts, run_texts
from vlm.nn.step.hidden_state import HiddenState
from vlm.nn.step.state import ReadContext
from vlm.nn.unpacked import unpacked

Directions = Literal["forward", "backward", "both"]
Source = Literal["forward", "backward", "both", "mean"]


class RecurrentEncoder(nn.Module):
    """Text encoder of LSTM or GRU layers.

    Args:
        vocab_size: Size V of the tokenizer's vocabulary.
        max_len: Maximum number of tokens of a text.
        dim: Width D of the states; each of two directions has D / 2.
        depth: Number of layers.
        cell: lstm (Hochreiter and Schmidhuber 1997) or gru (Cho et al. 2014).
        directions: "both" (Schuster and Paliwal 1997), "forward", or "backward": from the end, as
            Sutskever et al. (2014) read sources.
        token_types: Number of token types, such as first and second text of a pair; None for no type embedding.
        dropout: Dropout rate of embeddings and between layers.
    Shapes:
        tokens (B, L), segments (B, L) or None, types (B, L) or None -> Context, states (B, L, D), mask (B, L) or None
    """

    def __init__(
        self,
        *,
        vocab_size: Injected[int],
        max_len: Count,
        dim: Count,
        depth: Count = 1,
        cell: Cell = "lstm",
        directions: Directions = "both",
        token_types: Count | None = None,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        if directions == "both" and dim % 2:
            raise ValueError(f"dim {dim} is odd; two directions need an even one")
        self.dim, self.max_len, self.directions = dim, max_len, directions
        self.token_embed = ScaledEmbedding(vocab_size, dim)
        self.type_embed = None if token_types is None else nn.Embedding(token_types, dim)
        width = dim // 2 if directions == "both" else dim
        self.layers = nn.ModuleList(
            LAYERS[cell](dim, width, batch_first=True, bidirectional=directions == "both") for _ in range(depth)
        )
        self.dropout = Dropout(dropout)
        open_forget_gates(self)

    def forward(self, tokens: Tensor, segments: Tensor | None = None, types: Tensor | None = None) -> Context:
        """States of whole rows. Without segments, each row is one text; without types, all tokens have type 0."""
        x = self.token_embed(tokens)
        if self.type_embed is not None:
            x = x + self.type_embed(torch.zeros_like(tokens) if types is None else types)
        texts = unpacked(tokens, segments)
        x = texts.take(x)  # (T, M, D)
        x = reversed_texts(x, texts.lengths) if self.directions == "backward" else x
        for layer in self.layers:
            x = run_texts(cast(nn.LSTM | nn.GRU, layer), self.dropout(x), texts.lengths)
        x = reversed_texts(x, texts.lengths) if self.directions == "backward" else x
        states = texts.put(x, tokens.shape)
        return Context(states, None if segments is None else segments != 0)

    def flop(self, image_size: ImageSize = 0) -> Flop:
        return Flop(token=2 * sum(weight.numel() for weight in self.layers.parameters() if weight.ndim == 2))


class Bridge(nn.Module):
    """Computes the first hidden states of a decoder from the final states of its encoder.

    Args:
        context_dim: Width of the encoder's states.
        dim: Width D of the decoder's states.
        count: Number of tensors to compute.
        source: Direction of the encoder: "forward" takes the last state, "backward" the first, "both" half of each.
            "mean" takes the mean of all states, as for images (Xu et al. 2015, section 3.1.2).
    Shapes:
        states (B, S, context_dim) -> count of (B, D)
    """

    def __init__(self, *, context_dim: Count, dim: Count, count: int, source: Source) -> None:
        super().__init__()
        self.source = source
        self.projections = nn.ModuleList(nn.Linear(context_dim, dim) for _ in range(count))

    def forward(self, context: Context) -> list[Tensor]:
        summary = self.summary(context)
        return [torch.tanh(projection(summary)) for projection in self.projections]

    def summary(self, context: Context) -> Tensor:
        """Summarises all states in one vector: (B, context_dim)."""
        states, seen = context.states, context.full_mask
        if self.source == "mean":
            return (states * seen[..., None]).sum(1) / seen.sum(1, keepdim=True).clamp(min=1)
        last = states[torch.arange(len(states), device=states.device), (seen.sum(1) - 1).clamp(min=0)]
        if self.source != "both":
            return last if self.source == "forward" else states[:, 0]
        half = states.shape[-1] // 2
        return torch.cat([last[:, :half], states[:, 0, half:]], -1)


class RecurrentDecoder(HiddenStateDecoder):
    """Decoder of LSTM or GRU layers (Sutskever et al. 2014), which sees its context only in its first hidden states.

    Without context_dim it is a language model.

    Args:
        vocab_size: Size V of the tokenizer's vocabulary.
        max_len: Maximum number of tokens of a segment.
        dim: Width D of embeddings and hidden states.
        depth: Number of layers.
        cell: lstm or gru.
        context_dim: Width of the encoder's states; None for a language model.
        source: See Bridge.
        vocabulary_head: Output head; default the transposed token embedding.
        dropout: Dropout rate of embeddings, between layers and before the head.
    Shapes:
        tokens (B, L), segments (B, L), context states (B, S, context_dim) or None -> hidden (B, L, D)
    """

    def __init__(
        self,
        *,
        vocab_size: Injected[int],
        max_len: Count,
        dim: Count,
        depth: Count = 1,
        cell: Cell = "lstm",
        context_dim: Count | None = None,
        source: Source = "forward",
        vocabulary_head: VocabularyHead | None = None,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        self.max_len, self.dim, self.context_dim = max_len, dim, context_dim
        self.token_embed = ScaledEmbedding(vocab_size, dim)
        self.layers = nn.ModuleList(LAYERS[cell](dim, dim, batch_first=True) for _ in range(depth))
        self.parts = 2 if cell == "lstm" else 1  # number of tensors in a layer's hidden state
        count = depth * self.parts
        self.bridge = (
            None if context_dim is None else Bridge(context_dim=context_dim, dim=dim, count=count, source=source)
        )
        self.vocabulary_head, self.dropout = vocabulary_head, Dropout(dropout)
        open_forget_gates(self)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        context: Context | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        texts, begin = unpacked(tokens, segments), self.read(context).hidden
        hidden = [one.expand(len(tokens), -1)[texts.rows] for one in begin]
        x, _ = self._run(texts.take(self.token_embed(tokens)), hidden)  # padding after a text does not affect it
        return texts.put(self.dropout(x), tokens.shape)

    def read(self, context: Context | None) -> ReadContext:
        if self.bridge is not None and context is not None:
            return ReadContext([], hidden=self.bridge(context))
        zeros = self.token_embed.weight.new_zeros(1, self.dim)
        return ReadContext([], hidden=[zeros] * (len(self.layers) * self.parts))

    def read_token(self, tokens: Tensor, state: HiddenState) -> tuple[Tensor, list[Tensor]]:
        hidden = [one.flatten(0, 1) for one in state.hidden]
        x, after = self._run(self.token_embed(tokens).flatten(0, 1)[:, None], hidden)  # (B * G, 1, D)
        return x.view(*tokens.shape, -1), [one.unflatten(0, tokens.shape) for one in after]

    def _run(self, x: Tensor, hidden: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Runs all layers over texts (T, M, D) from hidden tensors (T, D); returns outputs and final hidden ones."""
        after: list[Tensor] = []
        for at, layer in enumerate(self.layers):
            begin = [one[None].contiguous() for one in hidden[at * self.parts : (at + 1) * self.parts]]
            x, end = layer(self.dropout(x), tuple(begin) if self.parts == 2 else begin[0])
            after += [one[0] for one in (end if self.parts == 2 else [end])]
        return x, after

    def flop(self, image_size: ImageSize = 0) -> Flop:
        token = 2 * sum(weight.numel() for weight in self.layers.parameters() if weight.ndim == 2)
        return Flop(token=token, head=2 * self.head_parts.weight.numel())
