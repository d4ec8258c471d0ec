"""Classifiers of texts and of their tokens."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from vlm.errors import Count, Injected, Rate
from vlm.models.classifier import Pool, PoolingClassifier
from vlm.models.context import Context
from vlm.models.flop import Flop
from vlm.models.text_encoder import TextEncoder
from vlm.nn.dropout import Dropout


class SequenceClassifier(PoolingClassifier):
    """Reads a text or a pair of texts, gives a logit for each class.

    Args:
        encoder: The text encoder.
        pool: As in PoolingClassifier; the state of "class" is that of the token that begins the text.
        transform: Whether the pooled state goes through a linear layer and a tanh first (BERT's pooler).
        others: As in PoolingClassifier.
    Shapes:
        tokens (B, L), segments (B, L) or None, types (B, L) or None, layout (N, S) as in InputRows, or None
        -> logits (N, C), of rows of one text each (B, C)
    """

    def __init__(
        self,
        *,
        encoder: TextEncoder,
        num_classes: Injected[int],
        pool: Pool = "class",
        pool_heads: Count = 4,
        transform: bool = False,
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__(encoder=encoder, num_classes=num_classes, pool=pool, pool_heads=pool_heads, dropout=dropout)
        self.transform = nn.Linear(encoder.dim, encoder.dim) if transform else None

    def forward(
        self, tokens: Tensor, segments: Tensor | None = None, types: Tensor | None = None, layout: Tensor | None = None
    ) -> Tensor:
        return self.classify(self.encoder(tokens, segments, types).apart(layout))

    def pooled(self, context: Context) -> Tensor:
        pooled = super().pooled(context)
        return pooled if self.transform is None else torch.tanh(self.transform(pooled))


class TokenClassifier(nn.Module):
    """Reads a text, gives a logit for each class of some of its tokens.

    Args:
        encoder: The text encoder.
        num_classes: Number C of classes.
        dropout: Probability of dropping an element of what the head reads.
    Shapes:
        tokens (B, L), segments (B, L) or None, types (B, L) or None,
        places (T,) in the rows end to end, or None for all -> logits (T, C)
    """

    def __init__(self, *, encoder: TextEncoder, num_classes: Injected[int], dropout: Rate = 0.0) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(encoder.dim, num_classes)
        nn.init.zeros_(self.head.weight)  # all classes are equally likely until something is learnt
        nn.init.zeros_(self.head.bias)

    def forward(
        self, tokens: Tensor, segments: Tensor | None = None, types: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        states = self.encoder(tokens, segments, types).states.flatten(0, 1)  # (B * L, D)
        return self.head(self.dropout(states if places is None else states.index_select(0, places)))

    def flop(self, image_size: int = 0) -> Flop:
        return replace(self.encoder.flop(), head=2 * self.head.weight.numel())
