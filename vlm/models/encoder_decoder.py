"""An image encoder joined to a text decoder."""

import torch
from torch import Tensor, nn

from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.models.flop import Flop, encoder_flop
from vlm.models.frozen_features import Features, encode

AT_ONCE = 8  # images that a CPU encodes at once


class VisionLanguageModel(nn.Module):
    """Reads an image, writes text: the decoder cross-attends to the encoder's states.

    Args:
        encoder: Images (B, 3, H, W) -> Context.
        decoder: A decoder whose context_dim is the encoder's dim.
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
        encoder, context = encoder_flop(self.encoder, image_size)
        return encoder + self.decoder.flop(context=context)

    def head(self, hidden: Tensor) -> Tensor:
        return self.decoder.head(hidden)

    @property
    def head_weight(self) -> Tensor:
        return self.decoder.head_weight


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
