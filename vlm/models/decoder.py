"""The causal text decoder, with or without context."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from vlm.models.context import Context
from vlm.nn.attention import KeyValueCache, MayAttend, causal_within
from vlm.nn.blocks import DecoderBlock, init_weights
from vlm.nn.position import LearnedPositions, positions_within


@dataclass
class DecodeState:
    """What decoding one token at a time carries from step to step.

    Shapes:
        context: keys and values of each block (B, N, S, K), or None; mask (B, S) or None
    """

    caches: list[KeyValueCache]
    context: list[tuple[Tensor, Tensor] | None]
    mask: Tensor | None

    @property
    def length(self) -> int:
        """Tokens decoded so far."""
        return self.caches[0].length


class Decoder(nn.Module):
    """Causal text decoder, cross-attending to context (Vaswani et al. 2017, section 3.1; pre-norm: Xiong et al. 2020).

    Without context_dim it is a language model. The output embedding is the input embedding (Press and Wolf 2017).

    Args:
        vocab_size: Size V of the tokenizer's vocabulary.
        max_len: The longest segment, in tokens.
        dim: Width D of the residual stream.
        depth: Number of blocks.
        num_heads: Number N of heads.
        head_dim: Width K of a head; by default D / N.
        mlp_ratio: Hidden width of the MLP over D.
        dropout: Probability of dropping an element of the embedding or of a branch's output, and an attention weight.
        context_dim: Width of the context's states; None for a decoder without context.
    Shapes:
        tokens (B, L), segments (B, L), context states (B, S, context_dim) or None -> hidden (B, L, D)
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_len: int,
        dim: int,
        depth: int,
        num_heads: int,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        context_dim: int | None = None,
    ) -> None:
        super().__init__()
        self.max_len = max_len
        self.token_embed = nn.Embedding(vocab_size, dim)
        self.positions = LearnedPositions(dim=dim, max_len=max_len)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            DecoderBlock(
                dim=dim,
                num_heads=num_heads,
                context_dim=context_dim,
                head_dim=head_dim,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        init_weights(self, dim=dim, branches=(2 if context_dim is None else 3) * depth)

    def forward(self, tokens: Tensor, segments: Tensor | None = None, context: Context | None = None) -> Tensor:
        """Hidden states of whole rows; without segments, each row is one segment."""
        if segments is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)  # (B, L)
            may_attend: MayAttend = "causal"
        else:
            positions, may_attend = positions_within(segments), causal_within(segments)
        x = self.embed(tokens, positions)
        states, mask = (None, None) if context is None else (context.states, context.mask)
        for block in self._blocks():
            x = block(x, may_attend, block.keys_values(states), mask)
        return self.norm(x)

    def _blocks(self) -> Iterable[DecoderBlock]:
        return cast(Iterable[DecoderBlock], self.blocks)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.dropout(self.token_embed(tokens) + self.positions(positions))  # (B, L, D)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary, only for the positions given: (..., D) -> (..., V)."""
        return nn.functional.linear(hidden, self.token_embed.weight)

    def start(self, context: Context | None, *, rows: int, max_len: int) -> DecodeState:
        """A state for decoding `rows` sequences of up to max_len tokens; the context's keys are computed here, once.

        Raises:
            ValueError: max_len is more than the decoder has positions for.
        """
        if max_len > self.max_len:
            raise ValueError(f"max_len {max_len} is more than the decoder's {self.max_len} positions")
        like = self.norm.weight if context is None else context.states
        caches = [
            KeyValueCache(
                rows=rows,
                heads=block.attn.num_heads,
                max_len=max_len,
                head_dim=block.attn.head_dim,
                like=like,
            )
            for block in self._blocks()
        ]
        states = None if context is None else context.states
        keys_values = [block.keys_values(states) for block in self._blocks()]
        return DecodeState(caches, keys_values, None if context is None else context.mask)

    def step(self, tokens: Tensor, state: DecodeState) -> Tensor:
        """Decodes the next tokens of each sequence: tokens (R, L) -> hidden (R, L, D); the state moves on by L."""
        positions = torch.arange(state.length, state.length + tokens.shape[1], device=tokens.device)  # (L,)
        x = self.embed(tokens, positions.expand_as(tokens))
        for block, cache, keys_values in zip(self._blocks(), state.caches, state.context, strict=True):
            x = block(x, "causal", keys_values, state.mask, cache)
        return self.norm(x)
