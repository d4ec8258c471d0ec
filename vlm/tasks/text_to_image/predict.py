"""Drawing pictures of texts with a trained model."""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from vlm.checkpoint.stored import Metadata
from vlm.data.batch import InputRows
from vlm.data.images.codebook import PatchCodebook
from vlm.data.text.inputs import encode_text
from vlm.data.text.words import to_single_line
from vlm.decoding.image_tokens import sample_image_tokens
from vlm.errors import UserError
from vlm.inference.arguments import LineArguments
from vlm.inference.command_options import DrawingOptions
from vlm.inference.predictor import BatchPredictor, Rows, Stored, TextPredictor, check_outputs, note_truncation
from vlm.models.context import Context
from vlm.models.image_decoder import TextToImage
from vlm.nn.step.packed import prepack, prepack_for_decoding

DEFAULTS = ("temperature", "top_k", "top_p", "guidance")  # options that a checkpoint stores


def check_drawing(values: Mapping[str, Any]) -> dict[str, float]:
    """Checks the drawing options of a checkpoint and returns them.

    Raises:
        ValueError: They are not drawing options.
    """
    for name, value in values.items():
        if name not in DEFAULTS or type(value) not in (int, float):
            raise ValueError(f"unsupported drawing option {name!s:.40}={value!r:.40}")
    return dict(values)


def encode_descriptions(model: TextToImage, texts: InputRows) -> Context:
    """Encodes B texts in the precision of the weights: states (B, S, D)."""
    with torch.autocast(texts.tokens.device.type, enabled=False):
        return model.encode(texts.tokens, texts.segments, texts.types, texts.layout)


def to_image(pixels: Tensor) -> Image.Image:
    """Returns an image of Pillow: uint8 (3, H, W)."""
    return Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())


def encode_png(image: Image.Image) -> bytes:
    """Returns an image as a PNG file."""
    out = BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def enlarge(image: Image.Image, side: int) -> Image.Image:
    """Enlarges a picture by a whole number, without smoothing, to at most this longer side; larger ones stay."""
    factor = max(1, side // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def encode_base64(image: Image.Image) -> str:
    """Returns an image as a PNG file in base64."""
    return b64encode(encode_png(image)).decode()


class ImageDrawer(BatchPredictor[str, str, list[Image.Image], DrawingOptions], TextPredictor):
    """A trained model that draws pictures of texts; arguments as in Predictor.

    Attributes:
        codebook: The patches that image tokens stand for.
        drawing: The checkpoint's drawing options.
    """

    task = "text_to_image"
    fields = ("text", "image")
    options = DrawingOptions
    arguments = LineArguments
    returns = "An image of Pillow; with results=N, a list of N"
    stored: ClassVar[Stored] = {"max_len": int, "codebook": PatchCodebook.from_state, "drawing": check_drawing}
    max_len: int
    codebook: PatchCodebook
    drawing: Mapping[str, float] = {}
    model: TextToImage

    def check(self) -> None:
        embed: Any = self.model.encoder
        self.check_vocabulary(embed.token_embed.weight)
        if self.model.decoder.grid != self.codebook.grid:
            grids = [" x ".join(map(str, grid)) for grid in (self.codebook.grid, self.model.decoder.grid)]
            raise UserError(
                f"the checkpoint's images have {grids[0]} tokens, its model {grids[1]}; use another checkpoint"
            )
        context = encode_descriptions(self.model, self.rows([""]))
        begin = torch.tensor([[self.model.decoder.begin_id]], device=self.device)
        check_outputs(self.model.head(self.model.decoder(begin, None, context)), len(self.codebook), "codes")

    def check_options(self, options: DrawingOptions) -> None:
        options.resolve(self.drawing)

    def prepare(self, source: str, options: DrawingOptions) -> str:
        return to_single_line(source, keep_no_break=True)

    @torch.inference_mode()
    def predict(self, batch: Sequence[str], options: DrawingOptions) -> Iterator[list[Image.Image]]:
        sampling, results = options.resolve(self.drawing), options.results
        context, empty = (encode_descriptions(self.model, self.rows(texts)) for texts in (batch, [""]))
        rows = torch.arange(len(batch), device=self.device).repeat_interleave(results)
        ids = [f"{text} {number}" for text in batch for number in range(results)]
        tokens = sample_image_tokens(self.model.decoder, context.rows(rows), sampling, empty=empty, ids=ids)
        images = list(map(to_image, self.codebook.decode(tokens)))
        yield from (images[at : at + results] for at in range(0, len(images), results))

    def rows(self, texts: Sequence[str]) -> InputRows:
        """Encodes texts as rows on the model's device."""
        return self.encode_rows([[encode_text(self.tokenizer, self.max_len, text)] for text in texts])

    def answer(self, result: list[Image.Image], options: DrawingOptions) -> Image.Image | list[Image.Image]:
        return result if options.results > 1 else result[0]

    def record(self, source: str, result: list[Image.Image], options: DrawingOptions, *, form: str = "jsonl") -> Rows:
        """The pictures as PNG files in base64."""
        images = list(map(encode_base64, result))
        if options.results == 1:
            return [{"text": source, "image": images[0]}]
        return [{"text": source, "rank": rank, "image": image} for rank, image in enumerate(images, start=1)]

    def notes(self, sources: Sequence[str], options: DrawingOptions) -> Iterator[str | UserError]:
        lengths = [len(self.tokenizer.encode(text)) for text in sources]
        yield from note_truncation(lengths, self.max_len - 1 - len(self.tokenizer.read_begin))

    def width(self, options: DrawingOptions) -> int:
        return options.results * (1 if options.resolve(self.drawing).guidance == 1 else 2)

    def prepack(self, rows: int, *, more: bool = True) -> None:
        prepack(self.model.encoder)
        prepack_for_decoding(self.model.decoder, rows=rows)

    @classmethod
    def describe(cls, about: Metadata) -> Iterator[str]:
        yield from super().describe(about)
        codebook = PatchCodebook.from_state(about["codebook"])
        rows, columns = codebook.grid
        size = codebook.patch_size
        yield f"codebook    {len(codebook)} patches of {size} x {size} pixels, {rows} x {columns} tokens per image"
