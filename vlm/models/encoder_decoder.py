"""Encoder-decoder models for images and texts, and projectors between the two."""

from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from vlm.errors import Count, UserError
from vlm.models.context import Context, Features, concat_batches, concat_states, encode, pick_states
from vlm.models.decoder import TextDecoder
from vlm.models.flop import Flop, encoder_flop, is_trainable
from vlm.nn.blocks import ACTIVATIONS
from vlm.nn.image_size import ImageSize, grid_of
from vlm.nn.vocabulary_loss import Head


class LinearProjector(nn.Module):
    """A linear layer; squares of neighbouring states may be concatenated first (PaliGemma; pixel shuffle: Idefics3).

    Args:
        context_dim: Width C of the encoder's states.
        dim: Width D of the decoder.
        shuffle: Side of these squares; 1 for none.
        bias: Whether the layer has biases.
        image_size: Height and width of the images; the grid of states has the same proportions.
    Shapes:
        states (B, S, C), row by row of a grid if shuffle > 1 -> (B, S / shuffle², D)
    Raises:
        UserError: The states do not form a grid, or its sides are not multiples of shuffle.
    """

    def __init__(
        self, *, context_dim: Count, dim: Count, shuffle: Count = 1, bias: bool = True, image_size: ImageSize = 1
    ) -> None:
        super().__init__()
        self.shuffle, self.image_size = shuffle, image_size
        self.fc = nn.Linear(context_dim * shuffle**2, dim, bias=bias)

    def forward(self, states: Tensor) -> Tensor:
        if self.shuffle > 1:
            count = states.shape[1]
            grid = grid_of(count, self.image_size)
            if grid is None or any(side % self.shuffle for side in grid):
                raise UserError(
                    f"model.projector.shuffle: the {count} states of an image do not form a grid whose sides are "
                    f"multiples of {self.shuffle}; set it to 1, or change data.image_size"
                )
            rows, columns = (side // self.shuffle for side in grid)
            cells = states.unflatten(1, (rows, self.shuffle, columns, self.shuffle))  # (B, rows, i, columns, j, C)
            states = cells.transpose(2, 3).flatten(3).flatten(1, 2)
        return self.fc(states)


class MLPProjector(nn.Module):
    """Two linear layers with an activation between them (LLaVA 1.5: Liu et al. 2024).

    Args:
        activation: See BlockConfig.
        others: See LinearProjector.
    Shapes:
        states (B, S, C) -> (B, S, D)
    """

    def __init__(
        self,
        *,
        context_dim: Count,
        dim: Count,
        activation: Literal["relu", "gelu", "gelu_tanh", "quick_gelu"] = "gelu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.fc1, self.fc2 = nn.Linear(context_dim, dim, bias=bias), nn.Linear(dim, dim, bias=bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.fc2(self.activation(self.fc1(states)))


class ProjectedEncoder(nn.Module):
    """An image encoder followed by a projector to the decoder's width.

    Args:
        backbone: Images (B, 3, H, W) -> Context without masked states.
        projector: States of the backbone -> (B, S, D).
        dim: Width D.
        drop: Number of leading states to drop, such as a class token.
    Shapes:
        images (B, 3, H, W), normalised -> Context, states (B, S, D); (B, K, 3, H, W) of several -> (B, K * S, D)
    """

    def __init__(self, *, backbone: nn.Module, projector: nn.Module, dim: Count, drop: int = 0) -> None:
        super().__init__()
        self.backbone, self.projector, self.dim, self.drop = backbone, projector, dim, drop

    def forward(self, images: Tensor) -> Context:
        if images.ndim == 4:
            return self.project(self.features(images))
        states = self(images.flatten(0, 1)).states  # (B * K, S, D)
        return Context(states.unflatten(0, images.shape[:2]).flatten(1, 2))

    def features(self, images: Tensor) -> Tensor:
        """States of the backbone: images (B, 3, H, W) -> (B, S, C)."""
        return self.backbone(images).states[:, self.drop :]

    def project(self, features: Tensor) -> Context:
        return Context(self.projector(features))


CHUNK_SIZE = 8  # batch size of the encoder on a CPU


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
        images (B, 3, H, W) normalised, or their cached features, tokens (B, L), segments (B, L) -> hidden (B, L, D);
        with image_states: images (T, 3, H, W) of all rows together
    """

    def forward(
        self,
        images: Tensor | Features,
        tokens: Tensor,
        segments: Tensor | None = None,
        image_states: Tensor | None = None,
        generated: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of texts about images.

        Args:
            image_states: For images inside texts, the index of the state at each PLACE among the states of all images;
                see `vlm.data.batch.PromptRows`. None if each row has one image, which all its texts read.
            generated: With image_states, the tokens that the model writes; see `Decoder`.
        """
        if image_states is None:
            return self.decoder(tokens, segments, self.encode(images))
        if not len(images):
            # Rows without images still run the encoder, so that DDP finds a gradient for each of its weights: zero.
            values = images.values if isinstance(images, Features) else images
            blank = values.new_zeros(1, *values.shape[1:])
            images = replace(images, values=blank) if isinstance(images, Features) else blank
        return self.read_prompts(self.encode(images).states, tokens, segments, image_states, generated)

    def read_prompts(
        self, states: Tensor, tokens: Tensor, segments: Tensor | None, image_states: Tensor, generated: Tensor | None
    ) -> Tensor:
        """Hidden states of texts with images inside, given the encoded images; arguments as in `forward`.

        Shapes:
            states (T, S, D) -> hidden (B, L, D)
        """
        if not len(states):  # no row has an image
            states = states.new_zeros(1, 1, states.shape[-1])
        picked = pick_states(states, image_states)
        return self.decoder(tokens, segments, states=picked, generated=generated)

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
        return self.encoder(texts, segments, types).split_packed_rows(layout)

    def flop(self, image_size: ImageSize = 0) -> Flop:
        read = self.encoder.flop()  # type: ignore[operator]
        return replace(
            self.decoder.flop(), read_token=read.token, read_pair=read.pair, read_learns=is_trainable(self.encoder)
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
    if images.device.type != "cpu" or len(images) <= CHUNK_SIZE:
        return model.encode(images)
    return concat_batches([model.encode(images[at : at + CHUNK_SIZE]) for at in range(0, len(images), CHUNK_SIZE)])
