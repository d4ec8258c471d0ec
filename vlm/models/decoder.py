"""The causal text decoder, with or without context."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from vlm.errors import Count, Supplied
from vlm.models.context import Context
from vlm.models.flop import Flop, decoder_flop
from vlm.nn.attention import changing_lengths
from vlm.nn.blocks import BlockConfig, BlockOptions, DecoderBlock, init_weights
from vlm.nn.dropout import Dropout
from vlm.nn.mask import Mask, within_segments
from vlm.nn.position import LearnedPositions, Positions, positions_within
from vlm.nn.step.block import StepBlock
from vlm.nn.step.cache import KeyValueCache, as_cached
from vlm.nn.step.state import DecodeState, KeysValues


class Decoder(nn.Module):
    """Causal text decoder, cross-attending to context (Vaswani et al. 2017, section 3.1).

    Without context_dim it is a language model. The output embedding is the input embedding (Press and Wolf 2017).

    Args:
        vocab_size: Size V of the tokenizer's vocabulary.
        max_len: The longest segment, in tokens.
        depth: Number of blocks.
        context_dim: Width of the context's states; None for a decoder without context.
        positions: Encoding of positions; by default learned vectors.
        block: As in BlockConfig.
    Shapes:
        tokens (B, L), segments (B, L), context states (B, S, context_dim) or None -> hidden (B, L, D)
    """

    def __init__(
        self,
        *,
        vocab_size: Supplied[int],
        max_len: Count,
        dim: Count,
        depth: Count,
        num_heads: Count,
        context_dim: Count | None = None,
        positions: Positions | None = None,
        **block: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        config = BlockConfig(dim=dim, num_heads=num_heads, **block)
        self.max_len, self.context_dim = max_len, context_dim
        self.token_embed = nn.Embedding(vocab_size, dim)
        self.positions = LearnedPositions(dim=dim, max_len=max_len) if positions is None else positions
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(DecoderBlock(config, context_dim=context_dim) for _ in range(depth))
        self.norm = config.make_final_norm()
        init_weights(self, dim=dim, branches=(2 if context_dim is None else 3) * depth)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        context: Context | None = None,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of whole rows; without segments, each row is one segment.

        Args:
            bounds: Of the segments, as in `TextRows`, where they are known: a GPU then needs no mask.
        """
        length = tokens.shape[1]
        if segments is None:
            positions = torch.arange(length, device=tokens.device)
            mask: Mask = "causal"
        else:
            positions, mask = positions_within(segments), within_segments(segments, bounds)
        x = self.embed(tokens, positions)
        position = self.positions.place(positions, keys=length)
        states, context_mask = (None, None) if context is None else (context.states, context.mask)
        # Rows of captions, documents in rows and rows of evaluations are of all lengths; else rows are of one.
        changing = context is not None or segments is not None or not self.training
        with changing_lengths(x.device) if changing else nullcontext():
            for block in self._blocks():
                x = block(x, mask, position, context=block.keys_values(states), context_mask=context_mask)
        return self.norm(x)

    def _blocks(self) -> Iterable[DecoderBlock]:
        return cast(Iterable[DecoderBlock], self.blocks)

    def flop(self, image_size: int = 0) -> Flop:
        return decoder_flop(self, self.context_dim) + Flop(head=2 * self.head_weight.numel())

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x, added = self.token_embed(tokens), self.positions.embed(positions)
        return self.dropout(x if added is None else x + added.to(x.dtype))  # (B, L, D)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over the vocabulary, only for the positions given: (..., D) -> (..., V)."""
        return nn.functional.linear(hidden, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """(V, D): the embedding of tokens."""
        return self.token_embed.weight

    def start(
        self,
        context: Context | None,
        *,
        rows: int,
        max_len: int,
        starts: Tensor | None = None,
        beams: int | None = None,
    ) -> DecodeState:
        """A state for decoding `rows` sequences of up to max_len tokens; the context's keys are computed here, once.

        Args:
            starts: Index of each row's first token, (rows,): texts of different lengths, aligned at their ends.
            beams: How many sequences next to each other share a text or context; by default rows / B, or 1 without
                context.
        Raises:
            ValueError: max_len is more than the decoder has positions for.
        """
        if max_len > self.max_len:
            raise ValueError(f"max_len {max_len} is more than the decoder's {self.max_len} positions")
        like = self.token_embed.weight if context is None else context.states
        keys_values = self.keys_values(context)
        if beams is None:
            beams = rows // like.shape[0] if keys_values[0] is not None and len(like) else 1
        caches = [
            KeyValueCache(
                rows=rows // beams,
                heads=block.attn.num_kv_heads,
                max_len=max_len * beams,
                head_dim=block.attn.head_dim,
                like=like,
            )
            for block in self._blocks()
        ]
        mask = None if context is None else context.mask
        blocks = [StepBlock(block) for block in self._blocks()]
        return DecodeState(blocks, caches, keys_values, mask, starts, beams, max_len)

    def keys_values(self, context: Context | None) -> list[KeysValues | None]:
        """Each block's keys and values of the context, laid out so that every step reads them in one go."""
        states = None if context is None else context.states
        return [_in_order(block.keys_values(states)) for block in self._blocks()]

    def step(self, tokens: Tensor, state: DecodeState) -> Tensor:
        """Decodes the next tokens of each sequence: tokens (R, L) -> hidden (R, L, D); the state moves on by L."""
        positions, inputs = state.look(self.positions, tokens.shape[1])
        added = self.positions.embed(positions)
        x = self.token_embed(tokens)
        x = (x if added is None else x + added.to(x.dtype)).flatten(0, 1)  # (R * L, D)
        bias = state.context_bias
        for block, cache, keys_values in zip(state.blocks, state.caches, state.context, strict=True):
            x = block.step(x, inputs, cache, keys_values, bias)
        return self.norm(x).unflatten(0, tokens.shape)


def _in_order(pair: KeysValues | None) -> KeysValues | None:
    return None if pair is None else (as_cached(pair[0]).contiguous(), as_cached(pair[1]).contiguous())
