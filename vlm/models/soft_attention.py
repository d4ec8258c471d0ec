"""Recurrent decoders that search the context softly before each token."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NotRequired, TypedDict, Unpack

import torch
from torch import Tensor, nn

from vlm.errors import Count, Injected, Rate
from vlm.models.context import Context
from vlm.models.flop import Flop
from vlm.models.heads import VocabularyHead
from vlm.models.recurrent import Bridge, Source
from vlm.nn.dropout import Dropout
from vlm.nn.recurrent import CELLS, AdditiveAttention, Cell, init_recurrent
from vlm.nn.step.hidden_state import Beginning, HiddenState
from vlm.nn.unpacked import unpacked
from vlm.nn.vocabulary_loss import Head


class SoftAttentionOptions(TypedDict):
    """Arguments that all decoders with soft attention share; `SoftAttentionDecoder` describes them."""

    vocab_size: Injected[int]
    max_len: Count
    dim: Count
    attention_dim: Count
    context_dim: Count
    vocabulary_head: NotRequired[VocabularyHead | None]
    dropout: NotRequired[Rate]


class SoftAttentionDecoder(nn.Module):
    """A recurrent decoder that attends to all states of its context before each token; subclasses are the papers'.

    Args:
        vocab_size: Size V of the tokenizer's vocabulary.
        max_len: The longest segment, in tokens.
        dim: Width D of embeddings and hidden states.
        attention_dim: Width A of the attention's hidden layer.
        context_dim: Width C of the encoder's states.
        source: As in Bridge.
        cell: gru or lstm.
        vocabulary_head: Head; by default the embedding of tokens.
        dropout: Rate of dropout on embeddings and before the head.
    Shapes:
        tokens (B, L), segments (B, L), context states (B, S, C) -> hidden (B, L, D)
    """

    prefix = None

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
        self.token_embed = nn.Embedding(vocab_size, dim)
        self.attention = AdditiveAttention(query_dim=dim, context_dim=context_dim, dim=attention_dim)
        self.cell = CELLS[cell](dim + context_dim, dim)
        self.bridge = Bridge(context_dim=context_dim, dim=dim, count=2 if cell == "lstm" else 1, source=source)
        self.vocabulary_head, self.dropout = vocabulary_head, Dropout(dropout)
        nn.init.normal_(self.token_embed.weight, std=dim**-0.5)
        init_recurrent(self)

    @abstractmethod
    def readout(self, embedded: Tensor, state: Tensor, glimpse: Tensor) -> Tensor:
        """What the head reads after a token: (..., D), (..., D), (..., C) -> (..., D)."""

    def gated(self, state: Tensor, glimpse: Tensor) -> Tensor:
        """What of the context enters the cell: (..., D), (..., C) -> (..., C)."""
        return glimpse

    def _advance(
        self, embedded: Tensor, hidden: Sequence[Tensor], memory: Sequence[Tensor], mask: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """One token: embedded (B, G, D), hidden (B, G, D) each -> readout, hidden, weights (B, G, S)."""
        states, keys = memory
        glimpse, weights = self.attention(hidden[0], keys, states, mask)
        glimpse = self.gated(hidden[0], glimpse)
        inputs = torch.cat([embedded, glimpse], -1).flatten(0, 1)
        flat = [one.flatten(0, 1) for one in hidden]
        after = self.cell(inputs, tuple(flat)) if len(flat) == 2 else (self.cell(inputs, flat[0]),)
        after = [one.unflatten(0, embedded.shape[:2]) for one in after]
        return self.readout(embedded, after[0], glimpse), after, weights

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        context: Context | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of whole rows; without segments, each row is one text."""
        return self.read(tokens, segments, context)[0]

    def read(self, tokens: Tensor, segments: Tensor | None, context: Context | None) -> tuple[Tensor, Tensor]:
        """Hidden states, and the weights by which each token attended to the context: (B, L, D), (B, L, S)."""
        texts, begin = unpacked(tokens, segments), self.keys_values(context)
        embedded = texts.take(self.dropout(self.token_embed(tokens)))[:, None]  # (T, 1, M, D)
        hidden = [one[texts.rows][:, None] for one in begin.hidden]  # (T, 1, D)
        memory = [one[texts.rows] for one in begin.memory]
        mask = None if begin.mask is None else begin.mask[texts.rows]
        outputs, looks = [], []
        for at in range(texts.places.shape[1]):
            output, hidden, weights = self._advance(embedded[:, :, at], hidden, memory, mask)
            outputs.append(output[:, 0])
            looks.append(weights[:, 0])
        if not outputs:
            return self.token_embed(tokens), tokens.new_zeros(*tokens.shape, memory[0].shape[1], dtype=torch.float)
        x, weights = torch.stack(outputs, 1), torch.stack(looks, 1)  # (T, M, D), (T, M, S)
        return self.dropout(texts.put(x, tokens.shape)), texts.put(weights, tokens.shape)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary: (..., D) -> (..., V)."""
        return self.head_parts.logits(hidden)

    @property
    def head_parts(self) -> Head:
        embedding = self.token_embed.weight
        return Head(embedding) if self.vocabulary_head is None else self.vocabulary_head.parts(embedding)

    def flop(self, image_size: int = 0) -> Flop:
        token = 2 * sum(weight.numel() for weight in self.parameters() if weight.ndim == 2)
        token -= 2 * sum(
            weight.numel() for weight in (self.token_embed.weight, self.attention.key.weight, *self.bridge.parameters())
        )
        size = self.attention.key.out_features
        head = 2 * self.head_parts.weight.numel()
        return Flop(
            token=token,
            state=2 * self.attention.key.weight.numel(),
            context_pair=2 * (size + self.context_dim),
            head=head,
        )

    def start(
        self,
        context: Context | None,
        *,
        rows: int,
        max_len: int,
        starts: Tensor | None = None,
        beams: int | None = None,
    ) -> HiddenState:
        """A state for decoding `rows` texts; arguments as in Decoder."""
        begin = self.keys_values(context)
        beams = rows // max(1, len(begin.hidden[0])) if beams is None else beams
        return HiddenState(begin, beams=beams, starts=starts)

    def keys_values(self, context: Context | None) -> Beginning:
        """What texts begin with, and the context's states and keys, computed once."""
        if context is None:
            raise ValueError("this decoder attends to a context, and was given none")
        states = context.states
        return Beginning(self.bridge(context), [states, self.attention.key(states)], context.mask)

    def step(self, tokens: Tensor, state: HiddenState) -> Tensor:
        """Reads the next tokens of each text: (R, L) -> hidden (R, L, D)."""
        parts, begin = [], state.beginning
        for token in tokens.unflatten(0, (-1, state.beams)).unbind(-1):  # (B, G)
            output, hidden, _ = self._advance(self.token_embed(token), state.hidden, begin.memory, begin.mask)
            state.advance(hidden)
            parts.append(output.flatten(0, 1))
        return torch.stack(parts, 1)


class BahdanauDecoder(SoftAttentionDecoder):
    """The decoder of Bahdanau et al. (2015, appendix A.2.2): a GRU that reads the last word and the searched context.

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

    An LSTM reads the last word and the attended states, scaled by a gate of its state before (section 4.2.1).
    """

    def __init__(
        self, *, source: Source = "mean", cell: Cell = "lstm", **options: Unpack[SoftAttentionOptions]
    ) -> None:
        super().__init__(source=source, cell=cell, **options)
        self.gate = nn.Linear(self.dim, 1)
        self.from_state = nn.Linear(self.dim, self.dim)
        self.from_context = nn.Linear(self.context_dim, self.dim, bias=False)

    def gated(self, state: Tensor, glimpse: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(state)) * glimpse

    def readout(self, embedded: Tensor, state: Tensor, glimpse: Tensor) -> Tensor:
        return embedded + self.from_state(state) + self.from_context(glimpse)
