"""The causal text decoder, with or without context, and the interface that all text decoders share."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Annotated, Any, Unpack, cast

import torch
from torch import Tensor, nn

from vlm.errors import Count, Injected, Range
from vlm.models.context import PLACE, Context, Prefix
from vlm.models.flop import Flop, decoder_flop
from vlm.models.heads import VocabularyHead
from vlm.nn.attention import (
    Mask,
    bidirectional_prompt_mask,
    causal_tail,
    changing_lengths,
    packed_causal_mask,
    prefix_mask,
    record_attention,
    to_additive_mask,
)
from vlm.nn.blocks import BlockConfig, BlockOptions, DecoderBlock, init_weights
from vlm.nn.dropout import Dropout
from vlm.nn.image_size import ImageSize
from vlm.nn.position import NO_POSITIONS, LearnedPositions, PositionInfo, Positions, segment_positions
from vlm.nn.step.block import KeyValueCache, StepBlock, StepInputs, to_cache_dtype
from vlm.nn.step.native import NativeBlocks
from vlm.nn.step.state import DecodeState, HiddenState, KeysValues, ReadContext, State
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
        """Hidden states of all tokens; without segments, each row is one segment.

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


class Decoder(TextDecoder):
    """Causal text decoder with cross-attention (Vaswani et al. 2017, section 3.1) or with the context as a prefix.

    Without context_dim and prefix it is a language model.

    Args:
        vocab_size: Size V of the tokenizer's vocabulary.
        max_len: Maximum number of tokens of a segment.
        depth: Number of blocks.
        context_dim: Width of the context's states for cross-attention; None for no cross-attention.
        prefix: Projects the context's states to a prefix; None for no prefix.
        positions: Position encoding; default learned vectors.
        vocabulary_head: Output head; default the transposed token embedding (Press and Wolf 2017).
        embed_norm: Whether to normalise embeddings before the first block, as BERT and GIT do.
        embed_scale: Factor of the token embeddings; a head that shares them is not scaled (Gemma).
        block: See BlockConfig.
    Shapes:
        tokens (B, L), segments (B, L), context states (B, S, context_dim) or None -> hidden (B, L, D)
    Raises:
        ValueError: Both context_dim and prefix are set.
    """

    def __init__(
        self,
        *,
        vocab_size: Injected[int],
        max_len: Count,
        dim: Count,
        depth: Count,
        num_heads: Count,
        context_dim: Count | None = None,
        prefix: Prefix | None = None,
        positions: Positions | None = None,
        vocabulary_head: VocabularyHead | None = None,
        embed_norm: bool = False,
        embed_scale: Annotated[float, Range(above=0)] = 1.0,
        **block: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        if context_dim is not None and prefix is not None:
            raise ValueError("context_dim is for cross-attention, prefix for a prefix; set one of them to null")
        config = BlockConfig(dim=dim, num_heads=num_heads, **block)
        self.dim, self.max_len = dim, max_len
        self.context_dim, self.embed_scale = context_dim, embed_scale
        self.token_embed = nn.Embedding(vocab_size, dim)
        self.positions = LearnedPositions(dim=dim, max_len=max_len) if positions is None else positions
        self.positions.check(max_len)
        self.embed_norm = config.make_norm() if embed_norm else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.prefix, self.vocabulary_head = prefix, vocabulary_head
        self.blocks = nn.ModuleList(DecoderBlock(config, context_dim=context_dim) for _ in range(depth))
        self.norm = config.make_final_norm()
        init_weights(self, dim=dim, branches=(2 if context_dim is None else 3) * depth)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        context: Context | None = None,
        bounds: Tensor | None = None,
        states: Tensor | None = None,
        generated: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of all tokens; without segments, each row is one segment.

        Args:
            bounds: Boundaries of the segments, as in `TextRows`; if given, a GPU needs no mask.
            states: For a decoder with a prefix, states (B, L, context_dim) that are read where tokens are PLACE;
                `context` is shared by all segments of a row.
            generated: With states, the tokens (B, L) that the model writes. If the prefix is not causal, a segment's
                other tokens attend to each other in both directions.
        """
        length = tokens.shape[1]
        if segments is None:
            places = torch.arange(length, device=tokens.device)
            mask: Mask = "causal"
        else:
            places, mask = segment_positions(segments), packed_causal_mask(segments, bounds)
            if self.prefix is not None and not self.prefix.causal and states is not None and generated is not None:
                mask = bidirectional_prompt_mask(segments, generated)
        # Row lengths change from batch to batch, except in training on equally long rows of text.
        changing = context is not None or segments is not None or not self.training
        with changing_lengths(tokens.device) if changing else nullcontext():
            if self.prefix is None or context is None:
                return self.norm(self._run_blocks(*self._embed_row(places, tokens, states), mask, context))
            count, first = context.states.shape[1], self._first_position(context)
            x, position = self._embed_row(
                places + (first[:, None] if isinstance(first, Tensor) else first), tokens, states
            )
            before, prefix_position = self._embed_row(
                self.prefix.places(context), context.tokens, context.states
            )  # (B, S, D)
            mask = prefix_mask(
                mask,
                context.mask,
                count=count,
                length=length,
                device=x.device,
                causal=self.prefix.causal,
                visible=context.visible_mask,
            )
            x = self._run_blocks(
                torch.cat([before, x], dim=1), position.prepend_prefix(prefix_position, count), mask
            )  # (B, S + L, D)
            return self.norm(x[:, count:])  # (B, L, D)

    def _embed_row(
        self, places: Tensor | None, tokens: Tensor | None, states: Tensor | None
    ) -> tuple[Tensor, PositionInfo]:
        """Input to the blocks and position information, for tokens, states, or tokens with states where they are PLACE.

        Args:
            places: Positions, (L,) or (B, L); None for states that have none.
        """
        if states is None:
            assert tokens is not None and places is not None
            return self.embed(tokens, places), self.positions.place(places, keys=tokens.shape[1])
        x = self._embed_states(places, tokens, states)
        return x, NO_POSITIONS if places is None else self.positions.place(places, keys=x.shape[1])

    def _embed_states(self, places: Tensor | None, tokens: Tensor | None, states: Tensor) -> Tensor:
        """Input to the blocks for states, or for tokens with states where they are PLACE: (B, L, D)."""
        if self.prefix is None:
            raise ValueError("states in a row of text need a decoder with a prefix")
        x = self.prefix(states)
        added = None if places is None else self.positions.embed(places)
        x = x if added is None else x + added.to(x.dtype)
        if tokens is None or places is None:
            return x
        return torch.where((tokens == PLACE)[..., None], x, self.embed(tokens.clamp(min=0), places))

    def _run_blocks(self, x: Tensor, position: PositionInfo, mask: Mask, context: Context | None = None) -> Tensor:
        """Runs the blocks, with context for cross-attention."""
        states, context_mask = (None, None) if context is None else (context.states, context.mask)
        for block in self._blocks():
            x = block(x, mask, position, context=block.keys_values(states), context_mask=context_mask)
        return x

    def _first_position(self, context: Context | None) -> int | Tensor:
        """Position of the first token of a text, (B,) if it differs between rows."""
        if self.prefix is None or context is None:
            return 0
        return self.prefix.first(context, self.positions, self.max_len)

    def _blocks(self) -> Iterable[DecoderBlock]:
        return cast(Iterable[DecoderBlock], self.blocks)

    @property
    def takes_context(self) -> bool:
        return self.context_dim is not None or self.prefix is not None

    def attention(self, tokens: Tensor, context: Context) -> Tensor | None:
        block: Any = self.blocks[-1]
        if (layer := block.cross_attn if self.prefix is None else block.attn) is None:
            return None
        with record_attention(layer) as [records]:
            self(tokens, None, context)
        # (B, N, L, S), or with a prefix (B, N, S + L, S + L) -> (B, L, S)
        return records[-1].mean(1)[:, -tokens.shape[1] :, : context.states.shape[1]]

    def flop(self, image_size: ImageSize = 0) -> Flop:
        width = self.context_dim if self.prefix is None else self.prefix.context_dim
        head = 0 if self.vocabulary_head is None else self.vocabulary_head.transform_flop
        return decoder_flop(self, width) + Flop(head=2 * self.head_parts.weight.numel() + head)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x, added = self.token_embed(tokens), self.positions.embed(positions)
        if self.embed_scale != 1:
            x = x * self.embed_scale
        return self.dropout(self.embed_norm(x if added is None else x + added.to(x.dtype)))  # (B, L, D)

    def start(
        self,
        context: Context | None,
        *,
        rows: int,
        max_len: int,
        starts: Tensor | None = None,
        beams: int | None = None,
    ) -> DecodeState:
        """Like `TextDecoder.start`.

        Raises:
            ValueError: max_len exceeds the decoder's number of positions.
        """
        if max_len > self.max_len:
            raise ValueError(f"max_len {max_len} is more than the decoder's {self.max_len} positions")
        if context is None:  # a vector, because in 8-bit models the weight has another type
            like = self.token_embed(torch.zeros(1, dtype=torch.long, device=self.token_embed.weight.device))
        else:
            like = context.states
        read = self.read(context)
        if beams is None:
            beams = rows // like.shape[0] if read.keys_values[0] is not None and len(like) else 1
        caches = self._caches(rows // beams, max_len * beams, like)
        blocks = [StepBlock(block) for block in self._blocks()]
        state = DecodeState(blocks, caches, read.keys_values, read.mask, starts, beams, max_len, read.first)
        if beams == 1 and all(map(NativeBlocks.is_supported, self._blocks())):
            state.native = NativeBlocks(list(self._blocks()))
        return state

    def _caches(self, rows: int, max_len: int, like: Tensor) -> list[KeyValueCache]:
        """An empty cache per block, with the dtype and device of `like`."""
        layers = [block.attn for block in self._blocks()]
        return [
            KeyValueCache(rows=rows, heads=layer.num_kv_heads, max_len=max_len, head_dim=layer.head_dim, like=like)
            for layer in layers
        ]

    def read(self, context: Context | None) -> ReadContext:
        """Keys and values of the context in each block, contiguous, because every step reads them."""
        if self.prefix is None or context is None:
            states, mask = (None, None) if context is None else (context.states, context.mask)
            pairs = (block.keys_values(states) for block in self._blocks())
            cached = [
                None if p is None else (to_cache_dtype(p[0]).contiguous(), to_cache_dtype(p[1]).contiguous())
                for p in pairs
            ]
            return ReadContext(cached, mask)
        first = self._first_position(context)
        prefix = self._read_prefix(
            *self._embed_row(self.prefix.places(context), context.tokens, context.states), context.mask
        )
        if context.tokens is None or context.mask is not None:
            return ReadContext(prefix, context.visible_mask, first)
        return ReadContext([(keys[:, :, :-1], values[:, :, :-1]) for keys, values in prefix], None, first)

    def _read_prefix(self, x: Tensor, position: PositionInfo, mask: Tensor | None) -> list[KeysValues]:
        """Keys and values of a prefix (B, S, D) in each block, computed as a step of S tokens."""
        assert self.prefix is not None
        rows, count = x.shape[:2]
        caches = self._caches(rows, count, x)
        visible = None if mask is None else mask[:, None, None]  # (B, 1, 1, S)
        if self.prefix.causal:
            before = causal_tail(count, count, x.device)[None, None]
            visible = before if visible is None else visible & before
        bias = None if visible is None else to_additive_mask(visible, caches[0].keys)
        inputs = StepInputs(1, count, PositionInfo(added=position.added, rotation=position.rotation), bias)
        x = x.flatten(0, 1)  # (B * S, D)
        with changing_lengths(x.device):
            for block, cache in zip(self._blocks(), caches, strict=True):
                x = StepBlock(block).step(x, inputs, cache, None, None)
        return [(cache.keys, cache.values) for cache in caches]

    def step(self, tokens: Tensor, state: State, states: Tensor | None = None) -> Tensor:
        """Like `TextDecoder.step`.

        Args:
            states: For a decoder with a prefix, states (R, L, context_dim) that are read where tokens are PLACE.
        """
        assert isinstance(state, DecodeState)
        positions, inputs = state.next_step_inputs(self.positions, tokens.shape[1])
        embedded = self.embed(tokens, positions) if states is None else self._embed_states(positions, tokens, states)
        x = embedded.flatten(0, 1)  # (R * L, D)
        bias = state.context_bias
        if state.native is not None and tokens.shape[1] == 1 and inputs.position.added is None:
            x = state.native.step(x, inputs.position.rotation, inputs.bias, state.caches, state.context, bias)
            return self.norm(x).unflatten(0, tokens.shape)
        for block, cache, keys_values in zip(state.blocks, state.caches, state.context, strict=True):
            x = block.step(x, inputs, cache, keys_values, bias)
        return self.norm(x).unflatten(0, tokens.shape)
