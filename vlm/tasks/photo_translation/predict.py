"""Translating texts that each have a photo, with a trained model."""

from collections.abc import Sequence

import torch
from PIL import Image
from torch import Tensor

from vlm.data.batch import InputRows
from vlm.data.images.image import Preprocess
from vlm.errors import UserError
from vlm.inference.arguments import LineArguments
from vlm.inference.command_options import PhotoTranslationOptions
from vlm.inference.inputs import ImageSource, collect_images, open_image
from vlm.inference.predictor import ImagePredictor, image_keys, normalize_pixels
from vlm.models.context import Context
from vlm.models.encoder_decoder import TextAndImageToText
from vlm.tasks.translation.predict import Translator, encode_texts


def encode_with_photos(
    model: TextAndImageToText, preprocess: Preprocess, texts: InputRows, pixels: Tensor | None
) -> Context:
    """Encodes texts, each with its image.

    Args:
        pixels: The images; None for images of the mean colour, which is 0 once normalised.
    Shapes:
        texts of B samples, pixels uint8 (B, 3, H, W) -> states (B, S + cells, D)
    """
    if pixels is None:
        images = next(model.parameters()).new_zeros(len(texts.counts), 3, *preprocess.image_size)
    else:
        images = normalize_pixels(model, preprocess, pixels)
    return encode_texts(model, texts, images=images)


TextWithImage = tuple[str, ImageSource | Tensor]


class PhotoTranslator(ImagePredictor, Translator):
    """Translates texts that each have a photo; arguments as in Predictor."""

    task = "photo_translation"
    options = PhotoTranslationOptions
    arguments = LineArguments
    model: TextAndImageToText

    def blank(self) -> tuple[str, Tensor]:
        return "", self.pixels(Image.new("RGB", (1, 1)))

    def sources(self, inputs: Sequence[str], options: PhotoTranslationOptions) -> list[TextWithImage]:
        images, _ = collect_images(options.image)
        if len(images) not in (1, len(inputs)):
            problem = f"--image: {len(images)} images for {len(inputs)} texts"
            raise UserError(f"{problem}; give one for each, or one for all")
        if len(images) == 1:
            pixels = self.pixels(open_image(images[0]))
            return [(text, pixels) for text in inputs]
        return list(zip(inputs, images, strict=True))

    def prepare(self, source: TextWithImage, options: PhotoTranslationOptions) -> tuple[str, Tensor]:
        text, image = source
        return text, image if isinstance(image, Tensor) else self.pixels(open_image(image))

    @torch.inference_mode()
    def encode(self, inputs: Sequence[tuple[str, Tensor]]) -> Context:
        texts, images = zip(*inputs, strict=True)
        pixels = torch.stack(images).to(self.device)
        return encode_with_photos(self.model, self.preprocess, self.rows(texts), pixels)

    def keys(self, inputs: Sequence[tuple[str, Tensor]]) -> list[str]:
        texts, images = zip(*inputs, strict=True)
        return [f"{text} {key}" for text, key in zip(texts, image_keys(images), strict=True)]

    def name_of(self, source: TextWithImage) -> str:
        return source[0]
