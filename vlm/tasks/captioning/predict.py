"""Captioning images with a trained model: load, preprocess, predict, format; the command `caption`."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from vlm.data.images.image import Preprocess
from vlm.decoding.options import Decoding
from vlm.errors import Count, UserError
from vlm.inference.image_predictor import ImagePredictor, image_keys
from vlm.inference.inputs import default_workers, find_images, image_batches, open_image, read_images, several_images
from vlm.inference.options import (
    DecodingOptions,
    Images,
    Language,
    ModelOptions,
    Option,
    Prefix,
    TraceFile,
    Workers,
    choose_workers,
    refuse,
)
from vlm.inference.predictor import check_outputs, normalized
from vlm.inference.writing import Observer, Trace, Writer, write_texts
from vlm.io.files import listed
from vlm.io.output import Output, Records
from vlm.io.resume_output import begun
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel, encode_in_parts
from vlm.tasks.captioning.sidecars import Sidecars, without_sidecars


@torch.inference_mode()
def encode_pixels(model: VisionLanguageModel, preprocess: Preprocess, pixels: Tensor) -> Context:
    """The context of preprocessed images: uint8 (B, 3, H, W) -> states (B, S, D)."""
    with torch.autocast(pixels.device.type, enabled=False):
        return encode_in_parts(model, normalized(model, preprocess, pixels))


class Captioner(ImagePredictor, Writer):
    """A trained captioning model, ready to use; arguments as in Predictor. Its inputs are what `pixels` makes."""

    task = "captioning"
    fields: ClassVar[tuple[str, ...]] = ("image", "caption")
    names = ("image", "caption")
    model: VisionLanguageModel

    def check(self) -> None:
        blank = self.pixels(Image.new("RGB", (1, 1)))[None].to(self.device)
        images = normalized(self.model, self.preprocess, blank)
        hidden = self.model(images, torch.tensor([[self.tokenizer.bos_id]], device=self.device))
        check_outputs(self.model.head(hidden), self.tokenizer.vocab_size, "tokens")

    @staticmethod
    def inputs(arguments: Sequence[str]) -> list[str]:
        return find_images(arguments)

    def predict(self, inputs: Sequence[str], records: Records, *, batch_size: int) -> int:
        options: Any = {"batch_size": batch_size, "decoding": self.usual(), "workers": default_workers()}
        return caption_files(self, inputs, records, **options)

    @classmethod
    def several(cls, inputs: Any) -> tuple[list[Any], bool]:
        return several_images(inputs)

    def use(
        self,
        inputs: Sequence[Any],
        *,
        prefix: str = "",
        language: str | None = None,
        batch_size: Count = 32,
        workers: Workers = None,
        **decoding: Any,
    ) -> list[Any]:
        """The caption of each image, or its captions where `results` is more than 1, the best first.

        Args:
            inputs: Paths, images of Pillow, or arrays (H, W, 3).
            prefix: Beginning of every caption.
            language: That of the captions, of a model of several; by default its first.
            batch_size: Images at a time; captions do not depend on it.
            workers: Threads that read images ahead; by default one a CPU, up to 8.
            decoding: Options of decoding.
        """
        search = self.searching(DecodingOptions(**decoding), prefix, language)
        batches = image_batches(inputs, self.pixels, batch_size=batch_size, workers=choose_workers(workers))
        return self.written(batches, search, rows=batch_size)

    def attention(self, image: Any, *, language: str | None = None, **decoding: Any) -> Any:
        """A picture of where the model looked while it wrote each word of an image's caption.

        Args:
            image: A path, an image of Pillow, or an array (H, W, 3).
            language: As in `use`.
            decoding: Options of decoding.
        Raises:
            UserError: Nothing of this model's attention can be read.
        """
        from vlm.inference.attention.drawing import AttentionDrawing, AttentionPicture

        drawing, opened = AttentionDrawing(self, "attention"), open_image(image)
        (caption,) = self.use([opened], language=language, **{**decoding, "results": 1})
        return AttentionPicture(caption, drawing.png(self.pixels(opened), caption, drawing.view(opened)))

    def encode(self, inputs: Sequence[Tensor]) -> Context:
        return encode_pixels(self.model, self.preprocess, torch.stack(list(inputs)).to(self.device))

    def keys(self, inputs: Sequence[Tensor]) -> list[str]:
        return image_keys(inputs)


def caption_files(
    captioner: Captioner,
    paths: Sequence[Any],
    records: Records,
    *,
    batch_size: int,
    decoding: Decoding | None = None,
    trees: dict[str, Any] | None = None,
    workers: int = 0,
    observer: Observer | None = None,
) -> int:
    """Captions image files and writes a record for each caption, as they come; returns the exit status.

    A file that cannot be read is named on stderr and does not keep the others from being captioned.

    Args:
        paths: As in `read_images`; a record names an image by its source as text.
        workers: As in `read_images`; captions do not depend on it.
        batch_size, trees, observer: As in `write_texts`.
    """
    failed = 0

    def batches() -> Iterator[tuple[list[str], list[Tensor]]]:
        nonlocal failed
        for good, pixels, bad in read_images(paths, captioner.pixels, batch_size=batch_size, workers=workers):
            failed += bad
            yield list(map(str, good)), pixels

    options: Any = {"count": len(paths), "batch_size": batch_size, "decoding": decoding or Decoding()}
    write_texts(captioner, batches(), records, **options, trees=trees, observer=observer)
    return 1 if failed else 0


def command(
    images: Images,
    model: ModelOptions,
    decoding: DecodingOptions,
    workers: Workers = None,
    prefix: Prefix = "",
    language: Language = None,
    trace: TraceFile = None,
    attention: Annotated[
        str | None, Option("Write a picture a caption of where the model looked.", metavar="DIR")
    ] = None,
    resume: Annotated[bool, Option("Skip images that --out has; append the others.", ("--continue",))] = False,
    sidecar: Annotated[bool, Option("Write photo.txt beside photo.jpg, where there is none.", ("--sidecar",))] = False,
    overwrite: Annotated[bool, Option("With --sidecar: replace those that are there.", ("--overwrite",))] = False,
    engine: Annotated[str | None, Option("ray: a cluster of Ray shares the shards.")] = None,
) -> int:
    """Captions images as the options say; returns the exit status."""
    names = listed(images)
    if overwrite and not sidecar:
        raise UserError("--overwrite replaces what --sidecar wrote; give --sidecar too")
    if any(name.endswith(".tar") for name in names):
        refuse("shards", {"--trace": trace, "--attention": attention, "--continue": resume, "--sidecar": sidecar})
        begin: Any = {"prefix": prefix, "language": language}
        return _caption_shards(names, model, decoding, begin, workers=workers, engine=engine)
    refuse("images", {"--engine": engine})
    paths, records = find_images(names), None
    if sidecar:
        others = {"--out": model.out, "--format": model.form != "text", "--continue": resume}
        refuse("--sidecar", others | {"--results": decoding.results > 1})
        paths, records = without_sidecars(paths, overwrite=overwrite), Sidecars()
    options: Any = {"trace": trace, "attention": attention, "resume": resume, "workers": choose_workers(workers)}
    return _caption(paths, records, model, decoding, prefix=prefix, language=language, **options)


def _caption_shards(
    tars: Sequence[str],
    model: ModelOptions,
    decoding: DecodingOptions,
    begin: Mapping[str, Any],
    *,
    workers: int | None,
    engine: str | None,
) -> int:
    """Captions the images of shards as the options say.

    Args:
        begin: Prefix and language of the captions.
    """
    from vlm.tasks.captioning.ray_captions import caption_on_ray
    from vlm.tasks.captioning.shard_captions import Plan, caption_by_rank, caption_shards

    engines = {None: caption_by_rank, "ray": caption_on_ray}
    if engine not in engines:
        raise UserError(f"--engine {engine}: is unknown; give ray, or leave it out")
    caption = partial(caption_files, batch_size=model.batch_size, workers=choose_workers(workers))
    plan = Plan(model=model, options=decoding, kind=Captioner, caption=caption, **begin)
    return caption_shards(tars, plan, engine=engines[engine])


def _caption(
    paths: Sequence[str],
    records: Records | None,
    model: ModelOptions,
    decoding: DecodingOptions,
    *,
    prefix: str,
    language: str | None,
    trace: str | None,
    attention: str | None,
    resume: bool,
    workers: int,
) -> int:
    """Captions image files into the records, by default those of --out."""
    output = Output(model.out, inputs=[*paths, model.checkpoint], append=resume)
    records = _records(model.form, output) if records is None else records
    captioner = model.load(Captioner)
    search = captioner.searching(decoding, prefix, language)
    traced = Trace(trace, beam=search.beam, inputs=[*paths, model.checkpoint], out=model.out)
    observer = None if attention is None else _attention(captioner, attention)
    if resume:
        paths = _left_over(paths, records, results=decoding.results, attention=attention is not None)
    options: Any = {"batch_size": model.batch_size, "workers": workers, "observer": observer}
    with output, records, traced:
        try:
            return caption_files(captioner, paths, records, decoding=search, trees=traced.trees, **options)
        finally:
            traced.finish()


def _records(form: str, output: Output) -> Records:
    """Lines or a table as captions come, or a page at the end."""
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
    """The images that --continue has still to caption.

    Raises:
        UserError: There is nothing that can be gone on with.
    """
    if records.output.path is None or records.form == "html":
        raise UserError("--continue needs --out FILE, in text, jsonl or csv: there it goes on")
    columns = ["image", *(["rank"] if results > 1 else []), "caption", "logprob", "confidence"]
    columns += ["attention"] if attention else []
    has = begun(records.output.path, form=records.form, columns=columns, paths=paths, results=results)
    return [path for path in paths if not has(path)]
