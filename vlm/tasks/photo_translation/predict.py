"""Translating texts with a photo beside each: load, encode, predict, format; the command `translate --image`."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
from PIL import Image
from torch import Tensor

from vlm.data.batch import InputRows
from vlm.data.images.image import Preprocess
from vlm.errors import Count, UserError
from vlm.inference.image_predictor import ImagePredictor, image_keys
from vlm.inference.inputs import open_image, read_images, several_images
from vlm.inference.options import DecodingOptions, ModelOptions, Option, Prefix, Texts, TraceFile, refuse_undecoded
from vlm.inference.predictor import check_outputs, normalized
from vlm.inference.text.text_rows import read_texts
from vlm.io.output import Records
from vlm.models.context import Context
from vlm.models.encoder_decoder import TextAndImageToText
from vlm.tasks.translation.predict import TextFiles, Translator, encode_texts, translate


def encode_with_photos(
    model: TextAndImageToText, preprocess: Preprocess, texts: InputRows, pixels: Tensor | None
) -> Context:
    """The context of texts, each beside its image.

    Args:
        pixels: The images; None for images of the mean colour, which is 0 once normalised.
    Shapes:
        texts of B samples, pixels uint8 (B, 3, H, W) -> states (B, S + cells, D)
    """
    if pixels is None:
        size, weight = preprocess.image_size, next(model.parameters())
        images = weight.new_zeros(len(texts.counts), 3, size, size)
    else:
        images = normalized(model, preprocess, pixels)
    return encode_texts(model, texts, images=images)


class PhotoTranslator(ImagePredictor, Translator):
    """A trained model that translates texts with photos, ready to use; arguments as in Predictor.

    Its inputs are texts, each with its image as `pixels` makes it.

    Attributes:
        photos: The image file of each text, or one of all.
    """

    task = "photo_translation"
    model: TextAndImageToText
    photos: Sequence[str] = ()

    def check(self) -> None:
        begin = torch.tensor([[self.tokenizer.bos_id]], device=self.device)
        hidden = self.model.decoder(begin, None, self.encode([("", self.pixels(Image.new("RGB", (1, 1))))]))
        check_outputs(self.model.head(hidden), self.tokenizer.vocab_size, "tokens")

    def predict(self, inputs: Sequence[str], records: Records, *, batch_size: int) -> int:
        raise UserError("vlm predict: this model reads a photo beside each text; use vlm translate --image FILE")

    def use(
        self, inputs: Sequence[str], *, image: Any = (), prefix: str = "", batch_size: Count = 32, **decoding: Any
    ) -> list[Any]:
        """The translation of each text beside its image, or its translations where `results` is more than 1.

        Args:
            inputs: Texts.
            image: Image of each text in turn, or one of all: paths, images of Pillow, or arrays (H, W, 3).
            prefix: Beginning of every translation.
            batch_size: Texts at a time; translations do not depend on it.
            decoding: Options of decoding.
        """
        refuse_undecoded(inputs)
        sources, alone = several_images(image)
        if not alone and len(sources) != len(inputs):
            raise UserError(f"image: {len(sources)} images of {len(inputs)} texts; give one a text, or one of all")
        images = [self.pixels(open_image(source)) for source in sources]
        pairs = list(zip(inputs, images * len(inputs) if alone else images, strict=True))
        batches = (pairs[start : start + batch_size] for start in range(0, len(pairs), batch_size))
        return self.written(batches, self.searching(DecodingOptions(**decoding), prefix), rows=batch_size)

    @torch.inference_mode()
    def encode(self, inputs: Sequence[tuple[str, Tensor]]) -> Context:
        texts, images = zip(*inputs, strict=True)
        pixels = torch.stack(images).to(self.device)
        return encode_with_photos(self.model, self.preprocess, self.rows(texts), pixels)

    def keys(self, inputs: Sequence[tuple[str, Tensor]]) -> list[str]:
        texts, images = zip(*inputs, strict=True)
        return [f"{text} {key}" for text, key in zip(texts, image_keys(images), strict=True)]

    def batches(self, texts: Sequence[str], batch_size: int) -> Iterator[tuple[Sequence[str], Sequence[Any]]]:
        starts = range(0, len(texts), batch_size)
        if len(self.photos) == 1:
            image = self.pixels(open_image(self.photos[0]))
            for start in starts:
                part = texts[start : start + batch_size]
                yield part, [(text, image) for text in part]
            return
        for start in starts:
            part, paths = texts[start : start + batch_size], self.photos[start : start + batch_size]
            for good, images, bad in read_images(paths, self.pixels, batch_size=batch_size):
                self.failed += bad
                read = [text for text, path in zip(part, paths, strict=True) if path in good]
                yield read, list(zip(read, images, strict=True))


def command(
    model: ModelOptions,
    decoding: DecodingOptions,
    image: Annotated[list[str], Option("Image of each text in turn, or one of all.", metavar="FILE")],
    files: TextFiles = None,
    text: Texts = None,
    prefix: Prefix = "",
    trace: TraceFile = None,
) -> int:
    """Translates texts beside images as the options say; returns the exit status."""
    texts = read_texts(files or [], text or [])
    if len(image) not in (1, len(texts)):
        raise UserError(f"--image: {len(image)} images for {len(texts)} texts; give one for each, or one for all")

    def load() -> PhotoTranslator:
        translator = model.load(PhotoTranslator)
        translator.photos = image
        return translator

    return translate(load, texts, model, decoding, inputs=[*(files or []), *image], prefix=prefix, trace=trace)
