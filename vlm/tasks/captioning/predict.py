"""Captioning images with a trained model, and the command `caption` with its output files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from vlm.data.images.image import Preprocess
from vlm.data.text.prompt_form import refuse_marks
from vlm.errors import UserError
from vlm.inference.arguments import ImageArguments
from vlm.inference.image_predictor import ImagePredictor, image_keys
from vlm.inference.inputs import find_images, open_image
from vlm.inference.options import (
    ImageOptions,
    Language,
    ModelOptions,
    Option,
    OutputOptions,
    Prompt,
    WritingOptions,
    prompt_of,
    refuse,
)
from vlm.inference.predictor import check_outputs, normalized
from vlm.inference.text_predictor import TextPredictor
from vlm.inference.use import Observer, write_results
from vlm.inference.writing import Trace, Writer
from vlm.io.files import listed
from vlm.io.output import Output, Records
from vlm.io.resume_output import begun
from vlm.models.context import Context, interleaved
from vlm.models.encoder_decoder import VisionLanguageModel, encode_in_parts
from vlm.tasks.captioning.sidecars import Sidecars, without_sidecars


@torch.inference_mode()
def encode_pixels(model: VisionLanguageModel, preprocess: Preprocess, pixels: Tensor) -> Context:
    """Encodes preprocessed images: uint8 (B, 3, H, W) -> states (B, S, D)."""
    with torch.autocast(pixels.device.type, enabled=False):
        return encode_in_parts(model, normalized(model, preprocess, pixels))


@dataclass(kw_only=True)
class CaptionOptions(WritingOptions, ImageOptions):
    """Options of captioning."""

    language: Language = None
    prompt: Prompt = None


class ImageTextPredictor(ImagePredictor, TextPredictor):
    """A trained model that reads images and writes text; arguments as in Predictor."""

    model: VisionLanguageModel

    def check(self) -> None:
        blank = self.pixels(Image.new("RGB", (1, 1)))[None].to(self.device)
        images = normalized(self.model, self.preprocess, blank)
        hidden = self.model(images, torch.tensor([[self.tokenizer.bos_id]], device=self.device))
        check_outputs(self.model.head(hidden), self.tokenizer.vocab_size, "tokens")


class Prompted(NamedTuple):
    """A prompt and the image inside it.

    Args:
        pixels: The image as the model reads it, whole or in squares, uint8 (T, 3, H, W).
        tokens: The prompt, with PLACE for each state of the image.
    """

    pixels: Tensor
    tokens: Sequence[int]


class ImageWriter(ImageTextPredictor, Writer):  # type: ignore[misc]  # of a narrower model than other writers
    """A trained model that writes texts about images, alone or in a prompt; arguments as in Predictor."""

    def prompted(self, image: Any, options: Any, *questions: str | None) -> list[Prompted]:
        """Returns the prompt with the image for each question; the question None asks for a caption.

        Raises:
            UserError: The prompt leaves no room for a text, or a question contains the name of a special token.
        """
        pixels, rows, columns = self.preprocess.views(open_image(image))
        return [Prompted(pixels, self._tokens(options, one, (rows, columns))) for one in questions]

    def _tokens(self, options: Any, question: str | None, squares: tuple[int, int]) -> list[int]:
        assert self.form is not None
        refuse_marks(self.tokenizer, question or "")
        pieces = self.form.prompt(prompt_of(options.prompt), question)
        tokens = self.form.ids(self.tokenizer, pieces, [squares]).tokens
        most, room = self.searching(options).max_tokens or self.max_tokens, self.model.decoder.max_len
        if len(tokens) + most > room:
            raise UserError(
                f"--prompt: has {len(tokens)} tokens with its image; with a text of {most} it has no room in the "
                f"model's {room}; shorten it, or lower --max-tokens"
            )
        return tokens

    def check_options(self, options: Any) -> None:
        super().check_options(options)
        if self.form is None and prompt_of(options.prompt) is not None:
            raise UserError("--prompt: this model reads images alone; leave it out")

    def encode(self, inputs: Sequence[Any]) -> Context:
        if self.form is None:
            return encode_pixels(self.model, self.preprocess, torch.stack(list(inputs)).to(self.device))
        images = {id(one.pixels): one.pixels for one in inputs}  # an image with several questions is encoded once
        pixels = torch.cat(list(images.values())).to(self.device)
        states = encode_pixels(self.model, self.preprocess, pixels).states  # (squares, S, D)
        counts = [len(squares) for squares in images.values()]
        own = dict(zip(images, (part.flatten(0, 1) for part in states.split(counts)), strict=True))
        return interleaved([one.tokens for one in inputs], torch.cat([own[id(one.pixels)] for one in inputs]))

    def keys(self, inputs: Sequence[Any]) -> list[str]:
        if self.form is None:
            return image_keys(inputs)
        keys = image_keys([one.pixels for one in inputs])
        return [f"{key} {one.tokens}" for key, one in zip(keys, inputs, strict=True)]


class Captioner(ImageWriter):
    """A trained captioning model, ready to use; arguments as in Predictor."""

    task = "captioning"
    fields: ClassVar[tuple[str, ...]] = ("image", "caption")
    names = ("image", "caption")
    options = CaptionOptions

    def prepare(self, source: Any, options: Any) -> Any:
        return super().prepare(source, options) if self.form is None else self.prompted(source, options, None)[0]

    def attention(self, image: Any, options: CaptionOptions) -> Any:
        """Draws the model's attention for each word of an image's caption.

        Args:
            image: A path, an image of Pillow, or an array (H, W, 3).
        Raises:
            UserError: This model offers no attention maps.
        """
        from vlm.inference.attention.drawing import AttentionDrawing, AttentionPicture

        drawing, opened = AttentionDrawing(self, "attention"), open_image(image)
        pixels = self.pixels(opened)
        ((_, texts),) = self.results([[pixels]], options)
        return AttentionPicture(texts[0], drawing.png(pixels, texts[0], drawing.view(opened)))


@dataclass(kw_only=True)
class CaptionFiles:
    """Options of `vlm caption` on the files that it writes, and on shards."""

    attention: Annotated[str | None, Option("Write a picture of the attention for each caption.", metavar="DIR")] = None
    resume: Annotated[bool, Option("Skip images that --out has; append the others.", ("--continue",))] = False
    sidecar: Annotated[bool, Option("Write photo.txt beside photo.jpg, where there is none.", ("--sidecar",))] = False
    overwrite: Annotated[bool, Option("With --sidecar: replace those that are there.", ("--overwrite",))] = False
    engine: Annotated[str | None, Option("ray: a cluster of Ray shares the shards.")] = None


def caption(
    arguments: ImageArguments, model: ModelOptions, output: OutputOptions, options: CaptionOptions, files: CaptionFiles
) -> int:
    """Captions images, or shards of images, as the options say; returns the exit status."""
    names = listed(arguments.images)
    if files.overwrite and not files.sidecar:
        raise UserError("--overwrite replaces what --sidecar wrote; give --sidecar too")
    beside = {"--continue": files.resume, "--sidecar": files.sidecar}
    if any(name.endswith(".tar") for name in names):
        refuse("shards", {"--trace": options.trace, "--attention": files.attention, **beside})
        return _caption_shards(names, model, output, options, engine=files.engine)
    refuse("images", {"--engine": files.engine})
    paths, records = find_images(names), None
    if files.sidecar:
        others = {"--out": output.out, "--format": output.form != "text", "--continue": files.resume}
        refuse("--sidecar", others | {"--results": options.results > 1})
        paths, records = without_sidecars(paths, overwrite=files.overwrite), Sidecars()
    return _caption_images(paths, records, model, output, options, files)


def _caption_shards(
    tars: Sequence[str], model: ModelOptions, output: OutputOptions, options: CaptionOptions, *, engine: str | None
) -> int:
    """Captions the images of shards as the options say."""
    from vlm.tasks.captioning.ray_captions import caption_on_ray
    from vlm.tasks.captioning.shard_captions import Plan, caption_by_rank, caption_shards

    engines = {None: caption_by_rank, "ray": caption_on_ray}
    if engine not in engines:
        raise UserError(f"--engine {engine}: is unknown; give ray, or leave it out")
    plan = Plan(model=model, output=output, options=options, kind=Captioner)
    return caption_shards(tars, plan, engine=engines[engine])


def _caption_images(
    paths: Sequence[str],
    records: Records | None,
    model: ModelOptions,
    output: OutputOptions,
    options: CaptionOptions,
    files: CaptionFiles,
) -> int:
    """Captions image files into the records, by default those of --out."""
    read = [*paths, model.checkpoint]
    out = Output(output.out, inputs=read, append=files.resume)
    records = _records(output.form, out) if records is None else records
    captioner = model.load(Captioner)
    captioner.check_options(options)
    trace = Trace(options.trace, captioner, options, inputs=read, out=output.out)
    observer = None if files.attention is None else _attention(captioner, files.attention)
    if files.resume:
        paths = _left_over(paths, records, results=options.results, attention=observer is not None)
    with out, records, trace:
        return write_results(captioner, paths, options, records, trees=trace.trees, observer=observer)


def _records(form: str, output: Output) -> Records:
    """Returns the writer of captions: lines or a table as they come, or a page at the end."""
    if form != "html":
        return Records(form=form, fields=Captioner.fields, output=output)
    if output.path is None:
        raise UserError("--format html needs --out FILE")
    from vlm.tasks.captioning.caption_page import CaptionPage

    return CaptionPage(output)


def _attention(captioner: Captioner, folder: str) -> Observer:
    """Draws the pictures of --attention."""
    from vlm.inference.attention.folder import AttentionFolder

    return AttentionFolder(captioner, folder)


def _left_over(paths: Sequence[str], records: Records, *, results: int, attention: bool) -> list[str]:
    """Returns the images that --continue still has to caption.

    Raises:
        UserError: The options or the file of --out do not allow continuing.
    """
    if records.output.path is None or records.form == "html":
        raise UserError("--continue needs --out FILE, in text, jsonl or csv, which it continues")
    columns = ["image", *(["rank"] if results > 1 else []), "caption", "logprob", "confidence"]
    columns += ["attention"] if attention else []
    has = begun(records.output.path, form=records.form, columns=columns, paths=paths, results=results)
    return [path for path in paths if not has(path)]
