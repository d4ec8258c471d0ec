"""The text encoder, and the masked language model on top of it."""

from dataclasses import replace
from typing import Annotated, Unpack

import torch
from torch import Tensor, nn

from vlm.errors import Count, Injected, Range, Rate
from vlm.models.context import Context
from vlm.models.flop import Flop, count_flop, token_ids
from vlm.models.heads import VocabularyHead
from vlm.models.recurrent import RecurrentEncoder
from vlm.nn.attention import Mask, changing_lengths, segment_mask
from vlm.nn.blocks import Activation, Block, BlockConfig, BlockOptions, init_weights
from vlm.nn.dropout import Dropout
from vlm.nn.embeddings import Spelling
from vlm.nn.image_size import ImageSize
from vlm.nn.position import LearnedPositions, Positions, segment_positions
from vlm.nn.vocabulary_loss import Head


class TextEncoder(nn.Module):
    """Bidirectional text encoder (Vaswani et al. 2017, section 3.1); BERT's with post-norm and embed_norm.

    Several texts may be packed into a row: texts do not attend to each other, and the positions of each start at 0.

    Args:
        vocab_size: Size V of the tokenizer's vocabulary.
        max_len: Maximum number of tokens of a text.
        depth: Number of blocks.
        token_types: Number of token types, such as first and second text of a pair; None for no type embedding.
        embed_norm: Whether to normalise the sum of the embeddings.
        embed_scale: Factor of the token embeddings.
        token_dropout: Probability of zeroing a token's embedding in training, leaving its position (word dropout: Iyyer
            et al. 2015; Gal and Ghahramani 2016).
        positions: Position encoding; default learned vectors.
        spelling: Encodes the spelling of words; added to the embeddings of their tokens.
        block: See BlockConfig.
    Shapes:
        tokens (B, L), segments (B, L) or None, types (B, L) or None -> Context, states (B, L, D), mask (B, L) or None
    """

    def __init__(
        self,
        *,
        vocab_size: Injected[int],
        max_len: Count,
        dim: Count,
        depth: Count,
        num_heads: Count,
        token_types: Count | None = None,
        embed_norm: bool = False,
        embed_scale: Annotated[float, Range(above=0)] = 1.0,
        token_dropout: Rate = 0.0,
        positions: Positions | None = None,
        spelling: Spelling | None = None,
        **block: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        config = BlockConfig(dim=dim, num_heads=num_heads, **block)
        self.dim, self.max_len, self.embed_scale = dim, max_len, embed_scale
        self.token_embed = nn.Embedding(vocab_size, dim)
        self.type_embed = None if token_types is None else nn.Embedding(token_types, dim)
        self.positions = LearnedPositions(dim=dim, max_len=max_len) if positions is None else positions
        self.positions.check(max_len)
        self.embed_norm = config.make_norm() if embed_norm else nn.Identity()
        self.token_dropout, self.dropout = token_dropout, Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(depth))
        self.norm = config.make_final_norm()
        init_weights(self, dim=dim, branches=2 * depth)
        self.spelling = spelling  # after init_weights: it has a different initialisation

    def forward(self, tokens: Tensor, segments: Tensor | None = None, types: Tensor | None = None) -> Context:
        """States of all tokens. Without segments, each row is one text; without types, all tokens have type 0."""
        mask: Mask = None
        if segments is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            positions, mask = segment_positions(segments), segment_mask(segments)
        states = self._run_blocks(tokens, positions, mask, types)
        return Context(states, None if segments is None else segments != 0)

    def read(self, tokens: Tensor, mask: Tensor, types: Tensor | None = None) -> Context:
        """States of rows of one text each, whose mask (B, L) is False after its end; for traced graphs."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return Context(self._run_blocks(tokens, positions, mask[:, None, None], types), mask)

    def _run_blocks(self, tokens: Tensor, positions: Tensor, mask: Mask, types: Tensor | None) -> Tensor:
        x = self.embed(tokens, positions, types)
        position = self.positions.place(positions, keys=tokens.shape[1])
        with changing_lengths(x.device):
            for block in self.blocks:
                x = block(x, mask, position)
        return self.norm(x)

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        x, added = self.token_embed(tokens), self.positions.embed(positions)
        if self.embed_scale != 1:
            x = x * self.embed_scale
        if self.training and self.token_dropout:
            x = x * (torch.rand(tokens.shape, device=x.device) >= self.token_dropout)[..., None]
        if self.spelling is not None:
            x = x + self.spelling(tokens, positions).to(x.dtype)
        x = x if added is None else x + added.to(x.dtype)
        if self.type_embed is not None:
            x = x + self.type_embed(torch.zeros_like(tokens) if types is None else types)
        return self.dropout(self.embed_norm(x))  # (B, L, D)

    def flop(self, image_size: ImageSize = 0) -> Flop:
        short, long = (count_flop(self, token_ids(length))[0] for length in (1, 2))
        pair = (long - 2 * short) // 2
        return Flop(token=short - pair, pair=pair)


class MaskedLanguageModel(nn.Module):
    """Encodes a text with masked tokens and returns the states that the head predicts them from (Devlin et al. 2019).

    The head is tied to the token embedding.

    Args:
        encoder: The text encoder.
        vocab_size: Size V of the tokenizer's vocabulary.
        bias, transform, norm_eps: See VocabularyHead; BERT has a bias and transform=gelu.
    Shapes:
        tokens (B, L), segments (B, L) or None, types (B, L) or None, places (T,): indices in the flattened rows -> (T,
        D)
    """

    def __init__(
        self,
        *,
        encoder: TextEncoder | RecurrentEncoder,
        vocab_size: Injected[int],
        bias: bool = False,
        transform: Activation | None = None,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        options = {"bias": bias, "transform": transform, "norm_eps": norm_eps}
        self.vocabulary_head = VocabularyHead(dim=encoder.dim, vocab_size=vocab_size, **options)  # type: ignore[arg-type]

    @property
    def head(self) -> Head:
        """Weights and transform of the head, for the loss."""
        return self.vocabulary_head.parts(self.encoder.token_embed.weight)

    def forward(self, tokens: Tensor, segments: Tensor | None, types: Tensor | None, places: Tensor) -> Tensor:
        return self.encoder(tokens, segments, types).states.flatten(0, 1).index_select(0, places)

    def flop(self, image_size: ImageSize = 0) -> Flop:
        head_size = sum(weight.numel() for weight in self.vocabulary_head.parameters() if weight.dim() > 1)
        return replace(self.encoder.flop(), head=2 * (self.encoder.token_embed.weight.numel() + head_size))
