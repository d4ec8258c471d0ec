"""The interface of causal text decoders that tasks and decoding use, for transformers and recurrent models."""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vlm.models.context import Context
from vlm.models.flop import Flop
from vlm.models.heads import VocabularyHead
from vlm.nn.image_size import ImageSize
from vlm.nn.step.hidden_state import HiddenState
from vlm.nn.step.state import ReadContext, State
from vlm.nn.vocabulary_loss import Head


class TextDecoder(nn.Module):
    """Base of all causal text decoders.

    Attributes:
        max_len: Maximum number of tokens of a segment.
        token_embed: Embedding of the V tokens.
        vocabulary_head: Output head; None for the transposed token embedding (Press and Wolf 2017).
    Shapes:
        tokens (B, L), segments (B, L), context states (B, S, C) or None -> hidden (B, L, D)
    """

    max_len: int
    token_embed: nn.Embedding
    vocabulary_head: VocabularyHead | None

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        context: Context | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of whole rows; without segments, each row is one segment.

        Args:
            bounds: Boundaries of the segments, as in `TextRows`.
        """

    @property
    @abstractmethod
    def takes_context(self) -> bool:
        """True if the decoder takes the states of an encoder."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary: (..., D) -> (..., V). Called only for positions that need them."""
        return self.head_parts.logits(hidden)

    @property
    def head_parts(self) -> Head:
        """Weights and transform of the head, for the loss."""
        embedding = self.token_embed.weight
        return Head(embedding) if self.vocabulary_head is None else self.vocabulary_head.parts(embedding)

    @abstractmethod
    def flop(self, image_size: ImageSize = 0) -> Flop:
        """Operations, as in `vlm.models.flop`."""

    def attention(self, tokens: Tensor, context: Context) -> Tensor | None:
        """Attention weights of each token over its context in the last layer, averaged over heads.

        None for a decoder without attention.

        Shapes:
            tokens (B, L) -> (B, L, S)
        """
        return None

    @abstractmethod
    def start(
        self,
        context: Context | None,
        *,
        rows: int,
        max_len: int,
        starts: Tensor | None = None,
        beams: int | None = None,
    ) -> State:
        """Creates the state for decoding `rows` sequences of up to max_len tokens.

        Args:
            starts: Step of each text's first token, (rows / beams,); texts of different lengths are right-aligned.
            beams: Number of adjacent sequences that share a text or context; default rows / B, or 1 without context.
        """

    @abstractmethod
    def read(self, context: Context | None) -> ReadContext:
        """The part of the context that all steps need, computed once."""

    @abstractmethod
    def step(self, tokens: Tensor, state: State) -> Tensor:
        """Decodes the next tokens of each sequence: tokens (R, L) -> hidden (R, L, D); the state advances by L."""


class HiddenStateDecoder(TextDecoder):
    """Base of decoders that represent a text by a fixed number of tensors, the hidden state, instead of a cache.

    Attributes:
        context_dim: Width of the context's states; None for a language model.
    """

    context_dim: int | None

    @property
    def takes_context(self) -> bool:
        return self.context_dim is not None

    @abstractmethod
    def read_token(self, tokens: Tensor, state: HiddenState) -> tuple[Tensor, Sequence[Tensor]]:
        """Reads a token of each beam: tokens (B, G) -> outputs (B, G, D) and the new hidden tensors."""

    def start(
        self,
        context: Context | None,
        *,
        rows: int,
        max_len: int,
        starts: Tensor | None = None,
        beams: int | None = None,
    ) -> HiddenState:
        read = self.read(context)
        if beams is None:
            beams = rows // len(read.hidden[0]) if self.takes_context and len(read.hidden[0]) else 1
        return HiddenState(read, rows=rows // beams, beams=beams, starts=starts)

    def step(self, tokens: Tensor, state: State) -> Tensor:
        assert isinstance(state, HiddenState)
        outputs = []
        for token in tokens.unflatten(0, (len(tokens) // state.beams, state.beams)).unbind(-1):  # (B, G)
            output, hidden = self.read_token(token, state)
            state.advance(hidden)
            outputs.append(output.flatten(0, 1))
        return torch.stack(outputs, 1)
