"""Captioning images with a trained model, and the HTML page of captions."""

import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from urllib.parse import quote

import torch
from PIL import Image
from torch import Tensor

from vlm.data.images.image import ImageError, Preprocess, load_image
from vlm.data.text.prompt_form import refuse_marks
from vlm.errors import UserError
from vlm.inference.arguments import single_prompt
from vlm.inference.command_options import CaptionOptions, PromptedQuestionOptions
from vlm.inference.inputs import ImageSource, open_image
from vlm.inference.predictor import ImagePredictor, TextPredictor, check_outputs, image_keys, normalize_pixels
from vlm.inference.writing import Writer
from vlm.io import page
from vlm.io.output import Output, Records
from vlm.models.context import Context, interleave_states
from vlm.models.encoder_decoder import VisionLanguageModel, encode_in_parts

if TYPE_CHECKING:
    from vlm.inference.attention.pictures import AttentionPicture


class CaptionPage(Records):
    """Records of captions, written as one page at the end.

    Args:
        output: The file.
    """

    def __init__(self, output: Output) -> None:
        self.form, self.output = "html", output
        self.records: list[Mapping[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self.records.append(record)

    def __exit__(self, *fault: object) -> None:
        images = [(path, list(records)) for path, records in groupby(self.records, lambda record: record["image"])]
        if images:
            cards = page.cards(self._card(path, records) for path, records in images)
            self.output.write(page.page("Captions", f"{len(images)} images", [cards]))

    def _card(self, path: str, records: Sequence[Mapping[str, Any]]) -> str:
        try:
            thumbnail: str | None = page.thumbnail(load_image(path))
        except ImageError:  # deleted since it was captioned
            thumbnail = None
        caption, *captions = (f"{record['caption']} ({record['confidence']:.0%})" for record in records)
        maps, links = [record["attention"] for record in records if "attention" in record], []
        for number, path_of_map in enumerate(maps, start=1):
            # Relative to the page, so that both can be moved together.
            relative = Path(os.path.relpath(path_of_map, os.path.dirname(str(self.output.path)) or "."))
            name = f"attention map {number}" if number > 1 else "attention map"
            links.append((name, quote(os.fsencode(relative.as_posix()))))
        return page.card(thumbnail, caption, [*captions, os.path.basename(path)], links=links)


@torch.inference_mode()
def encode_pixels(model: VisionLanguageModel, preprocess: Preprocess, pixels: Tensor) -> Context:
    """Encodes preprocessed images: uint8 (B, 3, H, W) -> states (B, S, D)."""
    with torch.autocast(pixels.device.type, enabled=False):
        return encode_in_parts(model, normalize_pixels(model, preprocess, pixels))


class ImagePrompt(NamedTuple):
    """A prompt and the image inside it.

    Args:
        pixels: The image as the model reads it, whole or in squares, uint8 (T, 3, H, W).
        tokens: The prompt, with PLACE for each state of the image.
    """

    pixels: Tensor
    tokens: Sequence[int]


class ImageTextPredictor(ImagePredictor, TextPredictor):
    """A trained model that reads images and writes text; arguments as in Predictor."""

    model: VisionLanguageModel

    def check(self) -> None:
        blank = self.pixels(Image.new("RGB", (1, 1)))[None].to(self.device)
        images = normalize_pixels(self.model, self.preprocess, blank)
        hidden = self.model(images, torch.tensor([[self.tokenizer.bos_id]], device=self.device))
        check_outputs(self.model.head(hidden), self.tokenizer.vocab_size, "tokens")

    def encode_prompts(self, prompts: Sequence[ImagePrompt]) -> Context:
        """Encodes prompts with the states of their images inside."""
        images = {id(prompt.pixels): prompt.pixels for prompt in prompts}  # each is encoded once for all its questions
        pixels = torch.cat(list(images.values())).to(self.device)
        states = encode_pixels(self.model, self.preprocess, pixels).states  # (squares, S, D)
        counts = [len(squares) for squares in images.values()]
        states_by_image = dict(zip(images, (part.flatten(0, 1) for part in states.split(counts)), strict=True))
        states_by_prompt = [states_by_image[id(prompt.pixels)] for prompt in prompts]
        return interleave_states([prompt.tokens for prompt in prompts], torch.cat(states_by_prompt))


PromptOptions = CaptionOptions | PromptedQuestionOptions


class ImageWriter(ImageTextPredictor, Writer):  # type: ignore[misc]  # of a narrower model than other writers
    """A trained model that writes texts about images, alone or in a prompt; arguments as in Predictor."""

    def build_prompts(self, image: ImageSource, options: PromptOptions, *questions: str | None) -> list[ImagePrompt]:
        """Returns the prompt with the image for each question; the question None asks for a caption.

        Raises:
            UserError: The prompt leaves no room for a text, or a question contains the name of a special token.
        """
        pixels, rows, columns = self.preprocess.views(open_image(image))
        return [ImagePrompt(pixels, self._tokens(options, question, (rows, columns))) for question in questions]

    def _tokens(self, options: PromptOptions, question: str | None, squares: tuple[int, int]) -> list[int]:
        assert self.form is not None
        refuse_marks(self.tokenizer, question or "")
        tokens = self.form.instruction(self.tokenizer, single_prompt(options.prompt), question, [squares]).tokens
        most, room = self.build_decoding(options).max_tokens or self.max_tokens, self.model.decoder.max_len
        if len(tokens) + most > room:
            fault = f"has {len(tokens)} tokens with its image; with a text of {most} it has no room in the model's"
            raise UserError(f"--prompt: {fault} {room}; shorten it, or lower --max-tokens")
        return tokens

    def check_options(self, options: Any) -> None:
        super().check_options(options)
        if self.form is None and single_prompt(options.prompt) is not None:
            raise UserError("--prompt: this model reads only images; leave it out")

    def encode(self, inputs: Sequence[Any]) -> Context:
        if self.form is None:
            return encode_pixels(self.model, self.preprocess, torch.stack(list(inputs)).to(self.device))
        return self.encode_prompts(inputs)

    def keys(self, inputs: Sequence[Any]) -> list[str]:
        if self.form is None:
            return image_keys(inputs)
        keys = image_keys([prompt.pixels for prompt in inputs])
        return [f"{key} {prompt.tokens}" for key, prompt in zip(keys, inputs, strict=True)]


class Captioner(ImageWriter):
    """A trained captioning model, ready to use; arguments as in Predictor."""

    task = "captioning"
    fields: ClassVar[tuple[str, ...]] = ("image", "caption")
    names = ("image", "caption")
    options = CaptionOptions

    def prepare(self, source: ImageSource, options: CaptionOptions) -> Tensor | ImagePrompt:
        return super().prepare(source, options) if self.form is None else self.build_prompts(source, options, None)[0]

    def attention(self, image: ImageSource, options: CaptionOptions) -> "AttentionPicture":
        """Draws the model's attention for each word of an image's caption.

        Args:
            image: A path, an image of Pillow, or an array (H, W, 3).
        Raises:
            UserError: This model offers no attention maps.
        """
        from vlm.inference.attention.pictures import AttentionDrawing, AttentionPicture

        drawing, decoded = AttentionDrawing(self, "attention"), open_image(image)
        pixels = self.pixels(decoded)
        ((_, texts),) = self.results([[pixels]], options)
        return AttentionPicture(texts[0], drawing.png(pixels, texts[0], drawing.view(decoded)))
