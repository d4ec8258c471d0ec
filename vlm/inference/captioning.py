"""Captioning images with a trained model: load, preprocess, predict, format; the command `caption`."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import exp
from typing import Annotated, Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from vlm.data.images.image import Preprocess
from vlm.data.text.tokenizer import Tokenizer, tokenizer_from_state
from vlm.decoding.constraints import Rules
from vlm.decoding.loop import Chunk, decode
from vlm.decoding.options import Decoding, Hypothesis, shortfall
from vlm.decoding.search import search
from vlm.decoding.trace import as_json
from vlm.errors import UserError
from vlm.inference.files import find_images
from vlm.inference.info import preprocess_line, tokenizer_line
from vlm.inference.inputs import default_workers, read_images
from vlm.inference.options import DecodingOptions, Images, ModelOptions, Option, Workers, choose_workers
from vlm.inference.output import Output, Records
from vlm.inference.predictor import Predictor, check_outputs, normalized
from vlm.inference.resume_output import begun
from vlm.inference.words import rules_of_words
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel, encode_in_parts
from vlm.nn.step.packed import prepack, prepack_for_decoding
from vlm.nn.step.replay import StepperPool

COMMAND = {
    "name": "caption",
    "help": 'Caption images: one line an image, PATH<TAB>CAPTION. "-" reads paths from stdin.',
}


@dataclass
class Caption:
    """A caption.

    Args:
        logprob: Log-probability in nats.
        confidence: The geometric mean of its tokens' probabilities.
        tokens: Tokens of the text, prefix included and the end token not: read again, the text may give others.
    """

    text: str
    logprob: float
    confidence: float
    tokens: list[int] = field(default_factory=list)


# Is shown an image (its path, its pixels uint8 (3, H, W)) with its captions before they are written; returns what it
# has to add to the record of each.
Observer = Callable[[str, Tensor, Sequence[Caption]], Sequence[dict[str, Any]]]


def caption_pixels(
    model: VisionLanguageModel,
    tokenizer: Tokenizer,
    preprocess: Preprocess,
    pixels: Tensor,
    *,
    max_tokens: int,
    pool: StepperPool | None = None,
) -> list[Caption]:
    """The likeliest caption of each preprocessed image; validation and evaluation decode through here.

    Args:
        pool: Recorded decode steps that batches of one evaluation share, on a GPU.
    Shapes:
        pixels uint8 (B, 3, H, W) -> B captions
    """
    decoding = Decoding(max_tokens=max_tokens)
    # Autocast would cast the weights anew for every token; and weights are evaluated as they are.
    with torch.inference_mode(), torch.autocast(pixels.device.type, enabled=False):
        context = encode_in_parts(model, normalized(model, preprocess, pixels))
        bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id
        results = search(model.decoder, context, decoding, bos_id=bos_id, eos_id=eos_id, pool=pool)
    return [_caption(tokenizer, decoding, texts[0]) for texts in results]


def image_ids(pixels: Tensor, decoding: Decoding) -> Sequence[int | str]:
    """Keys of images where captions are drawn: their content, wherever it is stored."""
    if decoding.sampling is None:
        return range(len(pixels))
    return [blake2b(image.cpu().numpy().tobytes(), digest_size=16).hexdigest() for image in pixels]


def _caption(tokenizer: Tokenizer, decoding: Decoding, text: Hypothesis) -> Caption:
    logprob = sum(text.logprobs)
    tokens = [*decoding.rules.prefix, *text.tokens]
    confidence = exp(logprob / max(1, len(text.logprobs)))
    return Caption(tokenizer.decode(tokens), logprob, confidence, [t for t in tokens if t != tokenizer.eos_id])


class Captioner(Predictor):
    """A trained captioning model, ready to use; arguments as in Predictor."""

    task = "captioning"
    fields: ClassVar[tuple[str, ...]] = ("image", "caption")
    model: VisionLanguageModel

    def restore(self, about: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer_from_state(about["tokenizer"])
        self.preprocess = Preprocess.from_state(about["preprocess"])
        self.max_tokens = int(about["max_tokens"])

    def check(self) -> None:
        blank = self.pixels(Image.new("RGB", (1, 1)))[None].to(self.device)
        images = normalized(self.model, self.preprocess, blank)
        hidden = self.model(images, torch.tensor([[self.tokenizer.bos_id]], device=self.device))
        check_outputs(self.model.head(hidden), self.tokenizer.vocab_size, "tokens")

    @staticmethod
    def inputs(arguments: Sequence[str]) -> list[str]:
        return find_images(arguments)

    def predict(self, inputs: Sequence[str], records: Records, *, batch_size: int) -> int:
        return caption_files(self, inputs, records, batch_size=batch_size, workers=default_workers())

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        yield tokenizer_line(about["tokenizer"])
        yield preprocess_line(about["preprocess"])

    def pixels(self, image: Image.Image) -> Tensor:
        """An image as the model reads it, uint8 (3, H, W)."""
        return self.preprocess(image)

    def rules(self, **options: Any) -> Rules:
        """Rules with words as people write them, as in `rules_of_words`."""
        return rules_of_words(self.tokenizer, **options)

    def caption(self, pixels: Sequence[Tensor]) -> list[Caption]:
        """Captions a batch of images that `pixels` made."""
        batch = torch.stack(list(pixels)).to(self.device)
        return caption_pixels(self.model, self.tokenizer, self.preprocess, batch, max_tokens=self.max_tokens)

    def stream(
        self, batches: Iterable[Sequence[Tensor]], decoding: Decoding, *, rows: int, trees: dict[int, Any] | None = None
    ) -> Iterator[list[Caption]]:
        """The captions of each image of a queue, in its order, best first.

        Args:
            batches: Results of `pixels`; taken as there is room for more.
            rows: Images at a time.
            trees: As in `decode`.
        """
        if decoding.max_tokens is None:
            decoding = replace(decoding, max_tokens=self.max_tokens)
        waiting, turn = {}, 0
        for place, texts in decode(
            self.model.decoder,
            self._encoded(batches, decoding),
            decoding,
            bos_id=self.tokenizer.bos_id,
            eos_id=self.tokenizer.eos_id,
            rows=rows,
            device=self.device,
            trees=trees,
        ):
            waiting[place] = texts
            while turn in waiting:
                yield [_caption(self.tokenizer, decoding, text) for text in waiting.pop(turn)]
                turn += 1

    def _encoded(self, batches: Iterable[Sequence[Tensor]], decoding: Decoding) -> Iterator[Chunk]:
        for batch in batches:
            if batch:
                pixels = torch.stack(list(batch))
                yield image_ids(pixels, decoding), self.encode(pixels)

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Context:
        """The context of images as the model reads them, uint8 (B, 3, H, W)."""
        return encode_in_parts(self.model, normalized(self.model, self.preprocess, pixels.to(self.device)))


def caption_files(
    captioner: Captioner,
    paths: Sequence[str],
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
        batch_size: Images at a time; captions do not depend on it.
        trees: Takes the tree of each image's beam search, ready to be written as JSON.
        workers: As in `read_images`; captions do not depend on it.
        observer: Is shown each image with its captions before they are written.
    """
    read: list[str] = []
    shown: dict[int, Tensor] = {}
    failed = 0

    def batches() -> Iterator[list[Tensor]]:
        nonlocal failed
        for good, pixels, bad in read_images(paths, captioner.pixels, batch_size=batch_size, workers=workers):
            failed += bad
            if observer is not None:
                shown.update(enumerate(pixels, start=len(read)))
            read.extend(good)
            yield pixels

    counts: list[int] = []
    decoding, traces = decoding or Decoding(), None if trees is None else dict[int, Any]()
    prepack(captioner.model.encoder)
    prepack_for_decoding(captioner.model.decoder, rows=min(batch_size, len(paths)) * decoding.columns)
    for place, captions in enumerate(captioner.stream(batches(), decoding, rows=batch_size, trees=traces)):
        added = [{}] * len(captions) if observer is None else observer(read[place], shown.pop(place), captions)
        for rank, (caption, more) in enumerate(zip(captions, added, strict=True), start=1):
            ranked = {"rank": rank} if decoding.results > 1 else {}
            records.write({"image": read[place], **ranked, "caption": caption.text, **_scores(caption), **more})
        if trees is not None and traces is not None:
            trees[read[place]] = as_json(traces.pop(place), captioner.tokenizer.piece)
        counts.append(len(captions))
    if (line := shortfall(counts, decoding)) is not None:
        print(line, file=sys.stderr)
    return 1 if failed else 0


def _scores(caption: Caption) -> dict[str, float]:
    return {"logprob": caption.logprob, "confidence": caption.confidence}


def command(
    images: Images,
    model: ModelOptions,
    decoding: DecodingOptions,
    workers: Workers = None,
    prefix: Annotated[str, Option("Beginning of every caption.")] = "",
    trace: Annotated[str | None, Option("Write the trees of beam search as JSON.", metavar="FILE")] = None,
    attention: Annotated[
        str | None, Option("Write a picture a caption of where the model looked.", metavar="DIR")
    ] = None,
    resume: Annotated[bool, Option("Skip images that --out has; append the others.", ("--continue",))] = False,
) -> int:
    """Captions images as the options say; returns the exit status."""
    paths = find_images(images)
    if trace is not None and decoding.beam == 1:
        raise UserError("--trace writes the tree of a beam search; give --beam N, more than 1")
    output = Output(model.out, inputs=[*paths, model.checkpoint], append=resume)
    traced = Output(trace, option="--trace", inputs=[*paths, model.checkpoint])
    records = _records(model.form, output)
    captioner = model.load(Captioner)
    search = decoding.search(decoding.rules(captioner.tokenizer, prefix), sample=bool(decoding.sample))
    observer = None if attention is None else _attention(captioner, attention)
    if resume:
        paths = _left_over(paths, records, results=decoding.results, attention=attention is not None)
    trees: dict[str, Any] | None = None if trace is None else {}
    options: Any = {"batch_size": model.batch_size, "workers": choose_workers(workers), "observer": observer}
    with output, records, traced:
        try:
            return caption_files(captioner, paths, records, decoding=search, trees=trees, **options)
        finally:
            if trees:
                traced.write(json.dumps(trees, ensure_ascii=False))


def _records(form: str, output: Output) -> Records:
    """Lines or a table as captions come, or a page at the end."""
    if form != "html":
        return Records(form=form, fields=Captioner.fields, output=output)
    if output.path is None:
        raise UserError("--format html needs --out FILE")
    from vlm.inference.caption_page import CaptionPage

    return CaptionPage(output)


def _attention(captioner: Captioner, folder: str) -> Observer:
    """Draws the pictures of --attention."""
    from vlm.inference.attention_folder import AttentionFolder

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
