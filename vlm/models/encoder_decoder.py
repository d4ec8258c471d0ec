"""Encoder-decoder models for images and texts."""

from dataclasses import replace

from torch import Tensor, nn

from vlm.models.context import Context, concat_batches, concat_states
from vlm.models.flop import Flop, encoder_flop, learns
from vlm.models.frozen_features import Features, encode
from vlm.models.text_decoder import TextDecoder
from vlm.nn.image_size import ImageSize
from vlm.nn.vocabulary_loss import Head

AT_ONCE = 8  # batch size of the encoder on a CPU


class EncoderDecoder(nn.Module):
    """Base class of a decoder with an encoder's states as context. A subclass defines the encoder's inputs.

    Args:
        encoder: Returns a Context.
        decoder: Takes context of the encoder's width.
    Raises:
        ValueError: The decoder takes no context.
    """

    def __init__(self, *, encoder: nn.Module, decoder: TextDecoder) -> None:
        super().__init__()
        if not decoder.takes_context:
            raise ValueError("the decoder takes no context; choose model/fusion=cross or model/fusion=prefix")
        self.encoder = encoder
        self.decoder = decoder

    def head(self, hidden: Tensor) -> Tensor:
        return self.decoder.head(hidden)

    @property
    def head_parts(self) -> Head:
        return self.decoder.head_parts


class VisionLanguageModel(EncoderDecoder):
    """Generates text from an image.

    Args:
        encoder: Images (B, 3, H, W) -> Context.
        decoder: See EncoderDecoder.
    Shapes:
        images (B, 3, H, W) normalised, or their cached features, tokens (B, L), segments (B, L) -> hidden (B, L, D)
    """

    def forward(self, images: Tensor | Features, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        return self.decoder(tokens, segments, self.encode(images))

    def encode(self, images: Tensor | Features) -> Context:
        return encode(self.encoder, images)

    def flop(self, image_size: ImageSize) -> Flop:
        encoder, _ = encoder_flop(self.encoder, image_size)
        return encoder + self.decoder.flop()


class TextToText(EncoderDecoder):
    """Generates text from text, for example a translation (Vaswani et al. 2017).

    Args:
        encoder: Texts (R, S), their segments and token types -> Context; see TextEncoder.
        decoder: See EncoderDecoder.
    Shapes:
        texts (R, S), tokens (B, L), segments (B, L), text_segments (R, S), types (R, S),
        layout (B, S) as in InputRows, or None if R = B -> hidden (B, L, D)
    """

    def forward(
        self,
        texts: Tensor,
        tokens: Tensor,
        segments: Tensor | None = None,
        text_segments: Tensor | None = None,
        types: Tensor | None = None,
        layout: Tensor | None = None,
    ) -> Tensor:
        return self.decoder(tokens, segments, self.encode(texts, text_segments, types, layout))

    def encode(
        self, texts: Tensor, segments: Tensor | None = None, types: Tensor | None = None, layout: Tensor | None = None
    ) -> Context:
        """Encodes packed texts: rows (R, S) -> states (B, S, D)."""
        return self.encoder(texts, segments, types).one_text_per_row(layout)

    def flop(self, image_size: ImageSize = 0) -> Flop:
        read = self.encoder.flop()  # type: ignore[operator]
        return replace(
            self.decoder.flop(), read_token=read.token, read_pair=read.pair, read_learns=learns(self.encoder)
        )


class TextAndImageToText(TextToText):
    """Generates text from a text and an image (multimodal translation, Specia et al. 2016).

    The context holds the states of the text, then those of the image.

    Args:
        image_encoder: Images (B, 3, H, W) -> Context of the encoder's width.
        others: See TextToText.
    Shapes:
        images (B, 3, H, W) normalised; for others see TextToText
    """

    def __init__(self, *, encoder: nn.Module, image_encoder: nn.Module, decoder: TextDecoder) -> None:
        super().__init__(encoder=encoder, decoder=decoder)
        self.image_encoder = image_encoder

    def forward(  # type: ignore[override]  # there is no text without its image
        self,
        texts: Tensor,
        tokens: Tensor,
        segments: Tensor | None = None,
        text_segments: Tensor | None = None,
        types: Tensor | None = None,
        layout: Tensor | None = None,
        *,
        images: Tensor,
    ) -> Tensor:
        return self.decoder(tokens, segments, self.encode(texts, text_segments, types, layout, images=images))

    def encode(  # type: ignore[override]
        self,
        texts: Tensor,
        segments: Tensor | None = None,
        types: Tensor | None = None,
        layout: Tensor | None = None,
        *,
        images: Tensor,
    ) -> Context:
        return concat_states([super().encode(texts, segments, types, layout), self.image_encoder(images)])

    def flop(self, image_size: ImageSize = 0) -> Flop:
        return encoder_flop(self.image_encoder, image_size)[0] + super().flop()


def encode_in_parts(model: VisionLanguageModel, images: Tensor) -> Context:
    """Like `encode`, but a few images at a time on a CPU.

    Activations of larger batches are allocated and freed at every layer, which takes a sixth of the time (measured with
    32 images of 224 pixels).
    """
    if images.device.type != "cpu" or len(images) <= AT_ONCE:
        return model.encode(images)
    return concat_batches([model.encode(images[at : at + AT_ONCE]) for at in range(0, len(images), AT_ONCE)])
