"""An image encoder joined to a text decoder."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.models.flop import Flop, encoder_flop
from vlm.models.frozen_features import Features, encode
from vlm.nn.vocabulary_loss import Head

AT_ONCE = 8  # images that a CPU encodes at once


class VisionLanguageModel(nn.Module):
    """Reads an image, writes text: the decoder takes the encoder's states by cross-attention or as a prefix.

    Args:
        encoder: Images (B, 3, H, W) -> Context.
        decoder: A decoder that takes context of the encoder's width.
    Shapes:
        images (B, 3, H, W) normalised, or the features kept of them, tokens (B, L), segments (B, L) -> hidden (B, L, D)
    """

    def __init__(self, *, encoder: nn.Module, decoder: Decoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, images: Tensor | Features, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        return self.decoder(tokens, segments, self.encode(images))

    def encode(self, images: Tensor | Features) -> Context:
        return encode(self.encoder, images)

    def flop(self, image_size: int) -> Flop:
        encoder = encoder_flop(self.encoder, image_size)
        image = {name: getattr(encoder, name) for name in ("image", "projection", "learned", "states")}
        return replace(self.decoder.flop(), **image)

    def head(self, hidden: Tensor) -> Tensor:
        return self.decoder.head(hidden)

    @property
    def head_parts(self) -> Head:
        return self.decoder.head_parts


def encode_in_parts(model: VisionLanguageModel, images: Tensor) -> Context:
    """As `encode`; on a CPU a few images at a time.

    States between layers of larger batches are fetched from the system and given back at every layer, which takes a
    sixth of the time (measured with 32 images of 224 pixels).
    """
    if images.device.type != "cpu" or len(images) <= AT_ONCE:
        return model.encode(images)
    parts = [model.encode(images[at : at + AT_ONCE]) for at in range(0, len(images), AT_ONCE)]
    masks = [context.mask for context in parts if context.mask is not None]
    return Context(torch.cat([context.states for context in parts]), torch.cat(masks) if masks else None)
