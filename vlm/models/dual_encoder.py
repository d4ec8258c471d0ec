"""The dual encoder: embeds images and texts in one space."""

import math
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlm.errors import Count
from vlm.models.classifier import PAIRS, Pool, check_pool, create_attention_pool, pool_states
from vlm.models.context import Context, Features, encode
from vlm.models.decoder import Decoder
from vlm.models.flop import Flop, count_flop, encoder_flop
from vlm.models.text_encoder import TextEncoder
from vlm.nn.image_size import ImageSize
from vlm.nn.position import segment_positions

TEMPERATURE = 0.07  # initial value
SIGMOID_TEMPERATURE, SIGMOID_BIAS = 0.1, -10.0  # initial values for independent pairs, most of which do not match
MIN_LOG_SCALE, MAX_LOG_SCALE = 0.0, math.log(100)  # range of the log scale


class DualEncoder(nn.Module):
    """Embeds images and texts so that matching pairs are close (CLIP: Radford et al. 2021; SigLIP: Zhai et al. 2023).

    Each side is encoded, pooled, projected to the same width and normalised. Several texts can be packed into a row.

    Args:
        encoder: Images (B, 3, H, W) -> Context; its attribute `dim` is its width.
        text_encoder: The text encoder, bidirectional or causal (CLIP).
        embed_dim: Width E of the embeddings.
        pool: Pooling of the image's states, see PoolingClassifier.
        pool_heads: Number of heads of the attention pooling.
        text_pool: State that represents a text: of its "first" token, of its "last" as in CLIP, or the "mean" of all,
            as in Sentence-BERT (Reimers and Gurevych 2019).
        text_fill: Token that pads each text, without its begin token, to the text encoder's max_len; it is not masked,
            as in SigLIP. None for no padding.
        text_bias: Whether the projection of texts has biases.
        image_projection: Whether pooled images are projected; if not, E must be their width.
        sigmoid: Whether each pair is classified independently, with a learned bias, as in SigLIP; else relative to the
            other pairs of a batch, as in CLIP.
    Shapes:
        images (B, 3, H, W) normalised, or their cached features, tokens (R, L), segments (R, L),
        places (T,): indices of the texts' first tokens in the flattened rows, layout (T, S) as in InputRows, or None
        if each row holds one text
        -> images (B, E), texts (T, E), of norm 1, and the scale (1,) of their products
    Raises:
        ValueError: The encoder lacks the token that the pooling needs, or E is not the width of unprojected images.
    """

    def __init__(
        self,
        *,
        encoder: nn.Module,
        text_encoder: TextEncoder | Decoder,
        embed_dim: Count,
        pool: Pool = "mean",
        pool_heads: Count = 4,
        text_pool: Literal["first", "last", "mean"] = "first",
        text_fill: int | None = None,
        text_bias: bool = False,
        image_projection: bool = True,
        sigmoid: bool = False,
    ) -> None:
        super().__init__()
        check_pool(encoder, pool)
        self.encoder, self.text_encoder = encoder, text_encoder
        self.pool, self.text_pool, self.text_fill = pool, text_pool, text_fill
        self.attention_pool = create_attention_pool(encoder, pool, pool_heads)
        width: int = encoder.dim * (2 if pool in PAIRS else 1)  # type: ignore[operator, assignment]
        if not image_projection and width != embed_dim:
            raise ValueError(f"embed_dim is {embed_dim}, images that are not projected have {width}; set it to that")
        self.image_projection = nn.Linear(width, embed_dim, bias=False) if image_projection else nn.Identity()
        self.text_projection = nn.Linear(text_encoder.dim, embed_dim, bias=text_bias)
        for projection in self._projections():
            if isinstance(projection, nn.Linear):
                nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
        first = TEMPERATURE if not sigmoid else SIGMOID_TEMPERATURE
        self.log_scale = nn.Parameter(torch.full((1,), -math.log(first)))
        self.bias = nn.Parameter(torch.full((1,), SIGMOID_BIAS)) if sigmoid else None

    def forward(
        self, images: Tensor | Features, tokens: Tensor, segments: Tensor, places: Tensor, layout: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.embed_images(images), self.embed_texts(tokens, segments, places, layout), self.scale

    @property
    def max_len(self) -> int:
        """Maximum number of tokens of a text, with its begin and end."""
        return self.text_encoder.max_len + (self.text_fill is not None)

    @property
    def scale(self) -> Tensor:
        """Inverse temperature, the factor of the similarities: (1,)."""
        return self.log_scale.float().exp()

    @torch.no_grad()
    def clamp_scale(self) -> None:
        """Clamps the scale to 1...100, as CLIP does after each training step."""
        self.log_scale.clamp_(MIN_LOG_SCALE, MAX_LOG_SCALE)

    def embed_images(self, images: Tensor | Features) -> Tensor:
        """Embeddings of images (B, 3, H, W): (B, E)."""
        pooled = self.pool_context(encode(self.encoder, images))
        return F.normalize(self.image_projection(pooled).float(), dim=-1)

    def embed_texts(self, tokens: Tensor, segments: Tensor, places: Tensor, layout: Tensor | None = None) -> Tensor:
        """Embeddings of packed texts (R, L): (T, E)."""
        if self.text_fill is not None:
            tokens = self._pad_texts(tokens, segments, places, self.text_fill)  # (T, max_len)
            segments, layout = torch.ones_like(tokens), None
            places = torch.arange(len(tokens), device=tokens.device) * tokens.shape[1]
        if self.text_pool == "last":
            following = F.pad(segments[:, 1:], (0, 1))
            ends = ((segments != following) & (segments != 0)).flatten().nonzero()[:, 0]
            places = ends[_ranks(places)]
        output = self.text_encoder(tokens, segments)
        context = output if isinstance(output, Context) else Context(output, segments != 0)
        if self.text_pool == "mean":
            pooled = pool_states(context.split_packed_rows(layout), "mean", None)
        else:
            pooled = context.states.flatten(0, 1).index_select(0, places)
        return F.normalize(self.text_projection(pooled).float(), dim=-1)

    def _pad_texts(self, tokens: Tensor, segments: Tensor, places: Tensor, fill: int) -> Tensor:
        """Unpacks texts into one row each, without begin tokens, padded with `fill`: (R, L) -> (T, max_len)."""
        begins = torch.zeros_like(tokens).flatten()
        begins[places] = 1
        position = segment_positions(segments).flatten() - 1
        read = (segments.flatten() != 0) & (position >= 0)
        rows = tokens.new_full((len(places), self.text_encoder.max_len), fill)
        rows[(begins.cumsum(0) - 1)[read], position[read]] = tokens.flatten()[read]
        return rows[_ranks(places)]

    def likelihoods(self, images: Tensor, texts: Tensor) -> Tensor:
        """Returns the probabilities (B, T) of texts (T, E) for images (B, E): a softmax over texts, or sigmoids."""
        logits = (self.scale.detach() * images @ texts.T).double()
        return logits.softmax(-1) if self.bias is None else (logits + self.bias.detach().double()).sigmoid()

    def pool_context(self, context: Context) -> Tensor:
        """Pooled vector of each image: states (B, S, D) -> (B, D)."""
        return pool_states(context, self.pool, self.attention_pool)

    def flop(self, image_size: ImageSize) -> Flop:
        encoder, context = encoder_flop(self.encoder, image_size)
        pool, _ = count_flop(self, context, method="pool_context")
        head = 2 * sum(weight.numel() for part in self._projections() for weight in part.parameters())  # per pair
        return encoder + replace(self.text_encoder.flop(), head=head) + Flop(pool=pool)

    def _projections(self) -> tuple[nn.Module, nn.Module]:
        return self.image_projection, self.text_projection


def _ranks(numbers: Tensor) -> Tensor:
    """Rank of each number in ascending order: (T,) -> (T,)."""
    return numbers.argsort().argsort()
