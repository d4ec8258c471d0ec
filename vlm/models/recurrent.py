"""Recurrent encoders and decoders, the predecessors of transformers, with soft attention over a context."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vlm.errors import Count, Injected, Rate
from vlm.models.context import Context
from vlm.models.decoder import HiddenStateDecoder
from vlm.models.flop import Flop
from vlm.models.heads import VocabularyHead
from vlm.nn.dropout import Dropout
from vlm.nn.image_size import ImageSize
from vlm.nn.recurrent import (
    CELLS,
    LAYERS,
    AdditiveAttention,
    Cell,
    ScaledEmbedding,
    open_forget_gates,
    reverse_texts,
    unpack_texts,
)
from vlm.nn.step.state import HiddenState, KeysValues, ReadContext

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
        """States of all tokens. Without segments, each row is one text; without types, all tokens have type 0."""
        x = self.token_embed(tokens)
        if self.type_embed is not None:
            x = x + self.type_embed(torch.zeros_like(tokens) if types is None else types)
        texts = unpack_texts(tokens, segments)
        x = texts.take(x)  # (T, M, D)
        x = reverse_texts(x, texts.lengths) if self.directions == "backward" else x
        for layer in self.layers:
            x = self.dropout(x)
            if len(x):  # packed, so that outputs do not depend on padding; an empty batch cannot be packed
                packed = pack_padded_sequence(x, texts.lengths.cpu(), batch_first=True, enforce_sorted=False)
                x, _ = pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=x.shape[1])
            else:
                x = layer(x)[0]
        x = reverse_texts(x, texts.lengths) if self.directions == "backward" else x
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
        states, mask = context.states, context.full_mask
        if self.source == "mean":
            return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        last = states[torch.arange(len(states), device=states.device), (mask.sum(1) - 1).clamp(min=0)]
        if self.source != "both":
            return last if self.source == "forward" else states[:, 0]
        half = states.shape[-1] // 2
        return torch.cat([last[:, :half], states[:, 0, half:]], -1)


class RecurrentDecoder(HiddenStateDecoder):
    """Decoder of LSTM or GRU layers (Sutskever et al. 2014), whose context only sets its first hidden states.

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
        texts, begin = unpack_texts(tokens, segments), self.read(context).hidden
        hidden = [tensor.expand(len(tokens), -1)[texts.rows] for tensor in begin]
        x, _ = self._run(texts.take(self.token_embed(tokens)), hidden)  # padding after a text does not affect it
        return texts.put(self.dropout(x), tokens.shape)

    def read(self, context: Context | None) -> ReadContext:
        if self.bridge is not None and context is not None:
            return ReadContext([], hidden=self.bridge(context))
        zeros = self.token_embed.weight.new_zeros(1, self.dim)
        return ReadContext([], hidden=[zeros] * (len(self.layers) * self.parts))

    def read_token(self, tokens: Tensor, state: HiddenState) -> tuple[Tensor, list[Tensor]]:
        hidden = [tensor.flatten(0, 1) for tensor in state.hidden]
        x, after = self._run(self.token_embed(tokens).flatten(0, 1)[:, None], hidden)  # (B * G, 1, D)
        return x.view(*tokens.shape, -1), [tensor.unflatten(0, tokens.shape) for tensor in after]

    def _run(self, x: Tensor, hidden: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Runs all layers over texts (T, M, D) from hidden tensors (T, D); returns outputs and final hidden ones."""
        after: list[Tensor] = []
        for at, layer in enumerate(self.layers):
            begin = [tensor[None].contiguous() for tensor in hidden[at * self.parts : (at + 1) * self.parts]]
            x, end = layer(self.dropout(x), tuple(begin) if self.parts == 2 else begin[0])
            after += [tensor[0] for tensor in (end if self.parts == 2 else [end])]
        return x, after

    def flop(self, image_size: ImageSize = 0) -> Flop:
        token = 2 * sum(weight.numel() for weight in self.layers.parameters() if weight.ndim == 2)
        return Flop(token=token, head=2 * self.head_parts.weight.numel())


Memory = tuple[Tensor, Tensor, Tensor | None]  # keys, values and mask of a context


class SoftAttentionOptions(TypedDict):
    """Arguments that all decoders with soft attention share; `SoftAttentionDecoder` documents them."""

    vocab_size: Injected[int]
    max_len: Count
    dim: Count
    attention_dim: Count
    context_dim: Count
    vocabulary_head: NotRequired[VocabularyHead | None]
    dropout: NotRequired[Rate]


class SoftAttentionDecoder(HiddenStateDecoder):
    """Base of recurrent decoders that attend to all context states before each token; a subclass follows each paper.

    Args:
        vocab_size: Size V of the tokenizer's vocabulary.
        max_len: Maximum number of tokens of a segment.
        dim: Width D of embeddings and hidden states.
        attention_dim: Width A of the attention's hidden layer.
        context_dim: Width C of the encoder's states.
        source: See Bridge.
        cell: gru or lstm.
        vocabulary_head: Output head; default the transposed token embedding.
        dropout: Dropout rate of embeddings and before the head.
    Shapes:
        tokens (B, L), segments (B, L), context states (B, S, C) -> hidden (B, L, D)
    """

    context_dim: int

    def __init__(
        self,
        *,
        vocab_size: Injected[int],
        max_len: Count,
        dim: Count,
        attention_dim: Count,
        context_dim: Count,
        source: Source,
        cell: Cell,
        vocabulary_head: VocabularyHead | None = None,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        self.max_len, self.dim, self.context_dim = max_len, dim, context_dim
        self.token_embed = ScaledEmbedding(vocab_size, dim)
        self.search = AdditiveAttention(query_dim=dim, context_dim=context_dim, dim=attention_dim)
        self.cell = CELLS[cell](dim + context_dim, dim)
        self.bridge = Bridge(context_dim=context_dim, dim=dim, count=2 if cell == "lstm" else 1, source=source)
        self.vocabulary_head, self.dropout = vocabulary_head, Dropout(dropout)
        open_forget_gates(self)

    @abstractmethod
    def readout(self, embedded: Tensor, state: Tensor, glimpse: Tensor) -> Tensor:
        """The head's input after a token: (..., D), (..., D), (..., C) -> (..., D)."""

    def gate_glimpse(self, state: Tensor, glimpse: Tensor) -> Tensor:
        """The part of the attended context that enters the cell: (..., D), (..., C) -> (..., C)."""
        return glimpse

    def _advance(
        self, embedded: Tensor, hidden: Sequence[Tensor], memory: Memory
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Reads a token: embedded (B, G, D), hidden (B, G, D) each -> hidden, glimpse (B, G, C), weights (B, G, S)."""
        glimpse, weights = self.search(hidden[0], *memory)
        glimpse = self.gate_glimpse(hidden[0], glimpse)
        inputs, before = torch.cat([embedded, glimpse], -1).flatten(0, 1), [tensor.flatten(0, 1) for tensor in hidden]
        after = self.cell(inputs, tuple(before)) if len(before) == 2 else (self.cell(inputs, before[0]),)
        return [tensor.unflatten(0, embedded.shape[:2]) for tensor in after], glimpse, weights

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        context: Context | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        return self.attend(tokens, segments, context)[0]

    def attention(self, tokens: Tensor, context: Context) -> Tensor:
        return self.attend(tokens, None, context)[1]

    def attend(self, tokens: Tensor, segments: Tensor | None, context: Context | None) -> tuple[Tensor, Tensor]:
        """Hidden states as from `forward`, and attention weights over the context: (B, L, D), (B, L, S)."""
        texts, read = unpack_texts(tokens, segments), self.read(context)
        embedded = self.dropout(self.token_embed(tokens))
        hidden = [tensor[texts.rows][:, None] for tensor in read.hidden]  # (T, 1, D)
        keys, values, mask = _memory(read.keys_values, read.mask)
        memory = keys[texts.rows], values[texts.rows], None if mask is None else mask[texts.rows]
        columns = []
        for column in texts.take(embedded)[:, None].unbind(2):  # (T, 1, D)
            hidden, glimpse, weights = self._advance(column, hidden, memory)
            columns.append((hidden[0], glimpse, weights))
        state, glimpse, weights = (torch.cat(parts, 1) for parts in zip(*columns, strict=True))  # (T, M, ...)
        state, glimpse, weights = (
            texts.put(tensor, tokens.shape) for tensor in (state, glimpse, weights)
        )  # (B, L, ...)
        return self.dropout(self.readout(embedded, state, glimpse)), weights

    def read(self, context: Context | None) -> ReadContext:
        if context is None:
            raise ValueError("this decoder attends to a context, but context is None")
        keys, values = self.search.key(context.states), context.states
        return ReadContext([(keys[:, None], values[:, None])], context.mask, hidden=self.bridge(context))

    def read_token(self, tokens: Tensor, state: HiddenState) -> tuple[Tensor, list[Tensor]]:
        embedded = self.token_embed(tokens)
        hidden, glimpse, _ = self._advance(embedded, state.hidden, _memory(state.context, state.mask))
        return self.readout(embedded, hidden[0], glimpse), hidden

    def flop(self, image_size: ImageSize = 0) -> Flop:
        """Operations; those of the bridge, once per text, are not counted."""
        uncounted = ("token_embed", "vocabulary_head", "bridge", "search.key", "search.score")
        weights = [
            weight for name, weight in self.named_parameters() if weight.ndim == 2 and not name.startswith(uncounted)
        ]
        key = self.search.key.weight  # (A, C)
        return Flop(
            token=2 * sum(weight.numel() for weight in weights),
            state=2 * key.numel(),
            context_pair=2 * sum(key.shape),
            head=2 * self.head_parts.weight.numel(),
        )


def _memory(context: Sequence[KeysValues | None], mask: Tensor | None) -> Memory:
    """Keys (B, S, A), values (B, S, C) and the mask of a context."""
    assert context[0] is not None
    keys, values = context[0]
    return keys[:, 0], values[:, 0], mask


class BahdanauDecoder(SoftAttentionDecoder):
    """The decoder of Bahdanau et al. (2015, appendix A.2.2): a GRU reads the last word and the attended context.

    Its readout is a layer of maxout units over the state, the word and the context. The GRU is PyTorch's, which applies
    the reset gate after the recurrent product.
    """

    def __init__(self, *, source: Source = "both", cell: Cell = "gru", **options: Unpack[SoftAttentionOptions]) -> None:
        super().__init__(source=source, cell=cell, **options)
        self.output = nn.Linear(2 * self.dim + self.context_dim, 2 * self.dim)

    def readout(self, embedded: Tensor, state: Tensor, glimpse: Tensor) -> Tensor:
        units = self.output(torch.cat([state, embedded, glimpse], -1))
        return units.unflatten(-1, (self.dim, 2)).amax(-1)


class ShowAttendTellDecoder(SoftAttentionDecoder):
    """The decoder of Show, Attend and Tell (Xu et al. 2015, section 3.1.2) with deterministic soft attention.

    An LSTM reads the last word and the attended states, scaled by a gate of the previous state (section 4.2.1).
    """

    def __init__(
        self, *, source: Source = "mean", cell: Cell = "lstm", **options: Unpack[SoftAttentionOptions]
    ) -> None:
        super().__init__(source=source, cell=cell, **options)
        self.gate = nn.Linear(self.dim, 1)
        self.from_state = nn.Linear(self.dim, self.dim)
        self.from_context = nn.Linear(self.context_dim, self.dim, bias=False)

    def gate_glimpse(self, state: Tensor, glimpse: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(state)) * glimpse

    def readout(self, embedded: Tensor, state: Tensor, glimpse: Tensor) -> Tensor:
        return embedded + self.from_state(state) + self.from_context(glimpse)
