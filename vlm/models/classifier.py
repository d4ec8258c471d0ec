"""Classifiers: an encoder of images or texts, a pooling of its states and a linear layer; tags of tokens."""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from vlm.errors import Count, Injected, Rate
from vlm.models.context import Context, Features, encode
from vlm.models.flop import Flop, SupportsFlop, count_flop, encoder_flop
from vlm.models.recurrent import RecurrentEncoder
from vlm.models.text_encoder import TextEncoder
from vlm.models.word_encoder import WordEncoder
from vlm.nn.attention import CrossAttention
from vlm.nn.blocks import Block, BlockConfig
from vlm.nn.dropout import Dropout
from vlm.nn.image_size import ImageSize

Pool = Literal["mean", "class", "attention", "attention_mlp", "class_mean", "distilled"]
PAIRS = ("class_mean", "distilled")  # poolings that concatenate two vectors


class AttentionPool(nn.Module):
    """One learned query that attends to all states (Lee et al. 2019), then an optional MLP (Zhai et al. 2022).

    Args:
        dim: Width D.
        num_heads: Number N of heads.
        block: Options of a norm and an MLP that follow the attention as a residual branch; None for attention only.
    Shapes:
        states (B, S, D), mask (B, S) or None -> (B, D)
    """

    def __init__(self, *, dim: int, num_heads: int, block: BlockConfig | None = None) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(dim) * dim**-0.5)
        self.attn = CrossAttention(dim=dim, context_dim=dim, num_heads=num_heads)
        self.norm = None if block is None else block.make_norm()
        self.mlp = None if block is None else block.make_mlp()

    def forward(self, states: Tensor, mask: Tensor | None = None) -> Tensor:
        query = self.query.expand(states.shape[0], 1, -1)  # (B, 1, D)
        pooled = self.attn(query, self.attn.keys_values(states), mask)[:, 0]
        return pooled if self.mlp is None or self.norm is None else pooled + self.mlp(self.norm(pooled))


def create_attention_pool(encoder: nn.Module, pool: Pool, num_heads: int) -> AttentionPool | None:
    """Creates the attention layer of a pooling; None for poolings without attention.

    Raises:
        ValueError: "attention_mlp" is given, but the encoder has no `Block` that defines the MLP.
    """
    dim: int = encoder.dim  # type: ignore[assignment]
    if pool == "attention":
        return AttentionPool(dim=dim, num_heads=num_heads)
    if pool != "attention_mlp":
        return None
    first = next((module for module in encoder.modules() if isinstance(module, Block)), None)
    if first is None:
        raise ValueError("pool=attention_mlp needs an encoder of vlm.nn.blocks.Block modules; set pool=attention")
    return AttentionPool(dim=dim, num_heads=num_heads, block=first.config)


def default_pool(encoder: nn.Module) -> Pool:
    """Default pooling of an encoder without a head: the class token if it has one, else the mean of its states."""
    return "mean" if getattr(encoder, "class_token", None) is None else "class"


def pool_states(context: Context, pool: Pool, attention: AttentionPool | None) -> Tensor:
    """Pools states to one vector per input: (B, S, D) -> (B, D), or (B, 2D) for the poolings in PAIRS.

    Args:
        pool: See PoolingClassifier.
        attention: Used instead of `pool` if it is not None.
    """
    states, mask = context.states, context.mask
    if attention is not None:
        return attention(states, mask)
    if pool == "class":
        return states[:, 0]
    if pool == "distilled":
        return states[:, :2].flatten(1)
    if pool == "class_mean":
        return torch.cat([states[:, 0], _masked_mean(states[:, 1:], None if mask is None else mask[:, 1:])], dim=1)
    return _masked_mean(states, mask)


def _masked_mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of the unmasked states: (B, S, D) -> (B, D)."""
    if mask is None:
        return states.mean(dim=1)
    return (states * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)


def check_pool(encoder: nn.Module, pool: Pool) -> None:
    """Checks that an image encoder has the token that a pooling needs.

    Raises:
        ValueError: The token is missing.
    """
    token = {"class": "class_token", "class_mean": "class_token", "distilled": "distillation_token"}.get(pool)
    if token is not None and getattr(encoder, token, None) is None:
        raise ValueError(f"pool={pool} needs an encoder with {token}=true; choose mean or attention")


class PoolingClassifier(nn.Module):
    """Pools the states of an encoder and computes logits of classes. Base of the image and text classifiers.

    Args:
        encoder: Returns a Context; its attribute `dim` is D.
        num_classes: Number C of classes.
        pool: "mean" of the states; "attention" by a learned query, "attention_mlp" with an MLP after it (SigLIP);
            "class", the first state; "class_mean", the first state and the mean of the others, concatenated (DINOv2);
            "distilled", the first two, concatenated (DeiT).
        pool_heads: Number of heads of the attention pooling.
        dropout: Dropout rate before the head.
    """

    def __init__(self, *, encoder: nn.Module, num_classes: int, pool: Pool, pool_heads: int, dropout: float) -> None:
        super().__init__()
        self.encoder = encoder
        dim: int = encoder.dim  # type: ignore[assignment]
        self.pool = pool
        self.attention_pool = create_attention_pool(encoder, pool, pool_heads)
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(2 * dim if pool in PAIRS else dim, num_classes)
        nn.init.zeros_(self.head.weight)  # training starts from equal probabilities
        nn.init.zeros_(self.head.bias)

    def classify(self, context: Context) -> Tensor:
        """Logits of encoded inputs: states (B, S, D) -> (B, C)."""
        return self.head(self.dropout(self.pool_context(context)))

    def flop(self, image_size: ImageSize) -> Flop:
        head = Flop(head=2 * self.head.weight.numel())
        if isinstance(self.encoder, SupportsFlop):  # a text encoder
            return self.encoder.flop(image_size) + head
        encoder, context = encoder_flop(self.encoder, image_size)
        pool, _ = count_flop(self, context, method="pool_context")
        return encoder + Flop(pool=pool) + head

    def pool_context(self, context: Context) -> Tensor:
        """Pooled vector of each input: states (B, S, D) -> (B, D), or (B, 2D) for the poolings in PAIRS."""
        return pool_states(context, self.pool, self.attention_pool)


class Classifier(PoolingClassifier):
    """Classifies images.

    Args:
        encoder: Images (B, 3, H, W) -> Context; its attribute `dim` is D.
        pool: See PoolingClassifier; "class" and "class_mean" need an encoder with a class token, "distilled" also one
            with a distillation token.
        others: See PoolingClassifier.
    Shapes:
        images (B, 3, H, W), normalised, or their cached features -> logits (B, C)
    Raises:
        ValueError: The encoder lacks the token that the pooling needs.
    """

    def __init__(
        self,
        *,
        encoder: nn.Module,
        num_classes: Injected[int],
        pool: Pool = "mean",
        pool_heads: Count = 4,
        dropout: Rate = 0.0,
    ) -> None:
        check_pool(encoder, pool)
        super().__init__(encoder=encoder, num_classes=num_classes, pool=pool, pool_heads=pool_heads, dropout=dropout)

    def forward(self, images: Tensor | Features) -> Tensor:
        return self.classify(encode(self.encoder, images))


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
        return self.classify(self.encoder(tokens, segments, types).split_packed_rows(layout))

    def pool_context(self, context: Context) -> Tensor:
        pooled = super().pool_context(context)
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
        self,
        *,
        encoder: TextEncoder | RecurrentEncoder | WordEncoder,
        num_classes: Injected[int],
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(encoder.dim, num_classes)
        nn.init.zeros_(self.head.weight)  # training starts from equal probabilities
        nn.init.zeros_(self.head.bias)

    @property
    def token_table(self) -> Tensor:
        """A tensor of the encoder with a row per token of the vocabulary."""
        encoder = self.encoder
        return encoder.spelling.pieces if isinstance(encoder, WordEncoder) else encoder.token_embed.weight

    def forward(
        self, tokens: Tensor, segments: Tensor | None = None, types: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        states = self.encoder(tokens, segments, types).states.flatten(0, 1)  # (B * L, D)
        return self.head(self.dropout(states if places is None else states.index_select(0, places)))

    def flop(self, image_size: ImageSize = 0) -> Flop:
        return replace(self.encoder.flop(), head=2 * self.head.weight.numel())
