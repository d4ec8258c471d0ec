"""The dual encoder: embeds images and texts in one space."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import Count
from vlm.models.classifier import PAIRS, AttentionPool, Pool, check_pool, pool_states
from vlm.models.context import Context
from vlm.models.flop import Flop, encoder_flop, measured
from vlm.models.frozen_features import Features, encode
from vlm.models.text_encoder import TextEncoder

TEMPERATURE = 0.07  # initial value
LEAST, MOST = 0.0, math.log(100)  # range of the log scale


class DualEncoder(nn.Module):
    """Embeds images and texts so that matching pairs are close (Radford et al. 2021, "CLIP").

    Each side is encoded, pooled, projected to the same width and normalised. A text is pooled by the state of its first
    token, so that several texts can be packed into a row.

    Args:
        encoder: Images (B, 3, H, W) -> Context; its attribute `dim` is its width.
        text_encoder: The text encoder.
        embed_dim: Width E of the embeddings.
        pool: Pooling of the image's states, see Classifier.
        pool_heads: Number of heads of the attention pooling.
    Shapes:
        images (B, 3, H, W) normalised, or their cached features, tokens (R, L), segments (R, L),
        places (T,): indices of the texts' first tokens in the flattened rows
        -> images (B, E), texts (T, E), of norm 1, and the scale (1,) of their products
    Raises:
        ValueError: The encoder has no class token, but the pooling needs one.
    """

    def __init__(
        self,
        *,
        encoder: nn.Module,
        text_encoder: TextEncoder,
        embed_dim: Count,
        pool: Pool = "mean",
        pool_heads: Count = 4,
    ) -> None:
        super().__init__()
        check_pool(encoder, pool)
        self.encoder, self.text_encoder = encoder, text_encoder
        dim: int = encoder.dim  # type: ignore[assignment]
        self.pool = pool
        self.attention_pool = AttentionPool(dim=dim, num_heads=pool_heads) if pool == "attention" else None
        self.image_projection = nn.Linear(2 * dim if pool in PAIRS else dim, embed_dim, bias=False)
        self.text_projection = nn.Linear(text_encoder.dim, embed_dim, bias=False)
        for projection in (self.image_projection, self.text_projection):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
        self.log_scale = nn.Parameter(torch.full((1,), -math.log(TEMPERATURE)))

    def forward(
        self, images: Tensor | Features, tokens: Tensor, segments: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.embed_images(images), self.embed_texts(tokens, segments, places), self.scale

    @property
    def scale(self) -> Tensor:
        """Inverse temperature, the factor of the similarities: (1,)."""
        return self.log_scale.float().exp()

    @torch.no_grad()
    def clamp_scale(self) -> None:
        """Clamps the scale to 1...100, as CLIP does after each training step."""
        self.log_scale.clamp_(LEAST, MOST)

    def embed_images(self, images: Tensor | Features) -> Tensor:
        """Embeddings of images (B, 3, H, W): (B, E)."""
        pooled = self.pooled(encode(self.encoder, images))
        return F.normalize(self.image_projection(pooled).float(), dim=-1)

    def embed_texts(self, tokens: Tensor, segments: Tensor, places: Tensor) -> Tensor:
        """Embeddings of packed texts (R, L): (T, E)."""
        states = self.text_encoder(tokens, segments).states.flatten(0, 1)  # (R * L, D)
        return F.normalize(self.text_projection(states.index_select(0, places)).float(), dim=-1)

    def pooled(self, context: Context) -> Tensor:
        """Pooled vector of each image: states (B, S, D) -> (B, D)."""
        return pool_states(context, self.pool, self.attention_pool)

    def flop(self, image_size: int) -> Flop:
        encoder, context = encoder_flop(self.encoder, image_size)
        pool, _ = measured(self, context, method="pooled")
        head = 2 * (self.image_projection.weight.numel() + self.text_projection.weight.numel())  # per pair
        return encoder + self.text_encoder.flop() + Flop(pool=pool, head=head)
