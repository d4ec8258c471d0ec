"""Models that write an image as a sequence of tokens of a codebook."""

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor, nn

from vlm.errors import Count, Injected
from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import EncoderDecoder
from vlm.models.flop import Flop, is_trainable
from vlm.nn.blocks import BlockOptions
from vlm.nn.grid_position import WrittenGridPositions
from vlm.nn.image_size import ImageSize
from vlm.nn.vocabulary_loss import Head


class ImageTokenDecoder(Decoder):
    """Causal decoder of image tokens, row by row from the top left (van den Oord et al. 2017; Ramesh et al. 2021).

    Every image has a token for each cell of the grid, so that there is no end token. The begin token, number K, is only
    read.

    Args:
        num_codes: Number K of codes of the codebook.
        positions: Positions of the grid.
        others: See Decoder.
    Shapes:
        tokens (B, L) read, beginning with the begin token, context states (B, S, context_dim) -> hidden (B, L, D), from
        which the head predicts the token of each cell: (B, L, K)
    """

    def __init__(
        self,
        *,
        num_codes: Injected[int],
        positions: WrittenGridPositions,
        dim: Count,
        depth: Count,
        num_heads: Count,
        context_dim: Count,
        **block: Unpack[BlockOptions],
    ) -> None:
        rows, columns = positions.grid
        super().__init__(
            vocab_size=num_codes + 1,
            max_len=rows * columns,
            dim=dim,
            depth=depth,
            num_heads=num_heads,
            context_dim=context_dim,
            positions=positions,
            **block,
        )
        self.num_codes = self.begin_id = num_codes
        self.grid = positions.grid

    @property
    def head_parts(self) -> Head:
        return Head(self.token_embed.weight[: self.num_codes])

    def shift(self, tokens: Tensor) -> Tensor:
        """What the decoder reads to predict the tokens of images: all but the last, after the begin token.

        Shapes:
            (B, L) -> (B, L)
        """
        return torch.cat([tokens.new_full((len(tokens), 1), self.begin_id), tokens[:, :-1]], dim=1)


class TextToImage(EncoderDecoder):
    """Writes the tokens of an image from a text.

    Args:
        encoder: Texts (R, S), their segments and token types -> Context; see TextEncoder.
        decoder: Writes image tokens.
    Shapes:
        texts (R, S), tokens (B, L) of the images, text_segments (R, S), types (R, S), layout (B, S) as in InputRows, or
        None if R = B -> hidden (B, L, D)
    """

    decoder: ImageTokenDecoder

    def __init__(self, *, encoder: nn.Module, decoder: ImageTokenDecoder) -> None:
        super().__init__(encoder=encoder, decoder=decoder)

    def forward(
        self,
        texts: Tensor,
        tokens: Tensor,
        text_segments: Tensor | None = None,
        types: Tensor | None = None,
        layout: Tensor | None = None,
    ) -> Tensor:
        """Hidden states from which the head predicts the tokens."""
        return self.read_tokens(tokens, self.encode(texts, text_segments, types, layout))

    def encode(
        self, texts: Tensor, segments: Tensor | None = None, types: Tensor | None = None, layout: Tensor | None = None
    ) -> Context:
        """Encodes packed texts: rows (R, S) -> states (B, S, D)."""
        return self.encoder(texts, segments, types).split_packed_rows(layout)

    def read_tokens(self, tokens: Tensor, context: Context) -> Tensor:
        """Hidden states from which the head predicts the tokens of images, given their encoded texts: (B, L, D)."""
        return self.decoder(self.decoder.shift(tokens), None, context)

    def flop(self, image_size: ImageSize = 0) -> Flop:
        read = self.encoder.flop()  # type: ignore[operator]
        return replace(
            self.decoder.flop(), read_token=read.token, read_pair=read.pair, read_learns=is_trainable(self.encoder)
        )
