"""An image encoder joined to a text decoder."""

from torch import Tensor, nn

from vlm.models.context import Context
from vlm.models.decoder import Decoder


class VisionLanguageModel(nn.Module):
    """Reads an image, writes text: the decoder cross-attends to the encoder's states.

    Args:
        encoder: Images (B, 3, H, W) -> Context.
        decoder: A decoder whose context_dim is the encoder's dim.
    Shapes:
        images (B, 3, H, W) normalised, tokens (B, L), segments (B, L) -> hidden (B, L, D)
    """

    def __init__(self, *, encoder: nn.Module, decoder: Decoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def forward(self, images: Tensor, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        return self.decoder(tokens, segments, self.encode(images))

    def encode(self, images: Tensor) -> Context:
        return self.encoder(images)

    def head(self, hidden: Tensor) -> Tensor:
        return self.decoder.head(hidden)
