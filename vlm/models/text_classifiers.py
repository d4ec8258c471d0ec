"""Classifiers of texts and of their tokens."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from vlm.errors import Count, Injected, Rate
from vlm.models.classifier import Pool, PoolingClassifier
from vlm.models.context import Context
from vlm.models.flop import Flop
from vlm.models.recurrent import RecurrentEncoder
from vlm.models.text_encoder import TextEncoder
from vlm.nn.dropout import Dropout
from vlm.nn.image_size import ImageSize


class SequenceClassifier(PoolingClassifier):
    """Classifies a text or a pair of texts.

    Args:
        encoder: The text encoder.
        pool: See PoolingClassifier; "class" takes the state of the text's first token.
        transform: Whether to apply a linear layer and a tanh to the pooled state first (BERT's pooler); "relu" for ReLU
            instead of tanh.
        others: See PoolingClassifier.
    Shapes:
        tokens (B, L), segments (B, L) or None, types (B, L) or None, layout (N, S) as in InputRows, or None
        -> logits (N, C); (B, C) for rows of one text each
    """

    def __init__(
        self,
        *,
        encoder: TextEncoder | RecurrentEncoder,
        num_classes: Injected[int],
        pool: Pool = "class",
        pool_heads: Count = 4,
        transform: bool | Literal["relu"] = False,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(encoder=encoder, num_classes=num_classes, pool=pool, pool_heads=pool_heads, dropout=dropout)
        self.transform = nn.Linear(encoder.dim, encoder.dim) if transform else None
        self.activation = torch.relu if transform == "relu" else torch.tanh

    def forward(
        self, tokens: Tensor, segments: Tensor | None = None, types: Tensor | None = None, layout: Tensor | None = None
    ) -> Tensor:
        return self.classify(self.encoder(tokens, segments, types).one_text_per_row(layout))

    def pooled(self, context: Context) -> Tensor:
        pooled = super().pooled(context)
        return pooled if self.transform is None else self.activation(self.transform(pooled))


class TokenClassifier(nn.Module):
    """Classifies tokens of a text.

    Args:
        encoder: The text encoder.
        num_classes: Number C of classes.
        dropout: Dropout rate before the head.
    Shapes:
        tokens (B, L), segments (B, L) or None, types (B, L) or None,
        places (T,): indices in the flattened rows, or None for all -> logits (T, C)
    """

    def __init__(
        self, *, encoder: TextEncoder | RecurrentEncoder, num_classes: Injected[int], dropout: Rate = 0.0
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(encoder.dim, num_classes)
        nn.init.zeros_(self.head.weight)  # training starts from equal probabilities
        nn.init.zeros_(self.head.bias)

    def forward(
        self, tokens: Tensor, segments: Tensor | None = None, types: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        states = self.encoder(tokens, segments, types).states.flatten(0, 1)  # (B * L, D)
        return self.head(self.dropout(states if places is None else states.index_select(0, places)))

    def flop(self, image_size: ImageSize = 0) -> Flop:
        return replace(self.encoder.flop(), head=2 * self.head.weight.numel())
