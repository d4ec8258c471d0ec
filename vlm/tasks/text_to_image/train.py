"""Text to image: the model reads a caption and writes a picture as tokens of a codebook. Its judges and report."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Unpack

import torch
from PIL import Image
from torch import Tensor

from vlm.checkpoint.locate import find_best_checkpoint
from vlm.data.batch import Batch, Targets
from vlm.data.images.image import ImageError
from vlm.data.images.token_field import ImageTokenField, ImageTokens
from vlm.data.shapes.scene_reader import read_captions
from vlm.data.shapes.scene_source import SceneSource
from vlm.data.text.inputs import EncodedSample, encode_text, input_rows
from vlm.data.text.tokenizer import Tokenizer
from vlm.decoding.image_tokens import MAX_GUIDANCE, ImageSampling, sample_image_tokens
from vlm.decoding.sampling import Sampling
from vlm.errors import Count, Range, UserError, print_error, printable
from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.evaluation.metrics.drawings import CEILING, RANDOM, DrawingMetric, JudgedPicture
from vlm.evaluation.report.content import Note, Pictures, Section, pick_samples
from vlm.inference.command_options import CaptionOptions
from vlm.inference.predictor import find_predictor_class, task_of
from vlm.inference.writing import Text
from vlm.models.context import Context
from vlm.models.flop import Work
from vlm.models.image_decoder import TextToImage
from vlm.nn.device import widest_float
from vlm.nn.step.replay import StepperPool
from vlm.randomness import key
from vlm.tasks.captioning.predict import Captioner
from vlm.tasks.shared.show import text_shape
from vlm.tasks.text_to_image.predict import encode_descriptions, encode_png, enlarge, to_image
from vlm.training.data_module import Data
from vlm.training.run.processes import is_rank_zero
from vlm.training.step.losses import Term, row_losses, token_loss
from vlm.training.step.task import Task, TaskOptions
from vlm.untrusted.sizes import JsonValue

# Finds the captions of pictures, the likeliest first.
Judge = Callable[[Sequence[Image.Image]], list[list[str]]]
SHOWN_SIDE = 192  # pixels of a picture in a report
CAPTIONER, PIXELS = "captioner_match", "pixel_match"  # metrics of the two judges
BEAMS = 8  # captions of a picture by the captioner
LIKELY = 0.2  # probability of a caption relative to the likeliest one, from which it is found in the picture
SAMPLE_CAPTIONER = "data/sample/captioner.ckpt"  # of the repository, which an installed package lacks


def find_captioner(path: str | None) -> str | None:
    """Returns the checkpoint of the judging captioner; None if there is to be none, or the default one is missing.

    Raises:
        UserError: Another checkpoint than the default one is missing.
    """
    if path is None or find_best_checkpoint(path).exists():
        return path
    if path != SAMPLE_CAPTIONER:
        raise UserError(f"task.captioner: {path} does not exist; give a captioner's checkpoint, or null")
    if is_rank_zero():
        print_error(f"task.captioner: {path} is not here, so that no captioner judges the pictures", "note")
    return None


def load_captioner(path: str, device: torch.device) -> Judge:
    """Returns the judge that captions pictures with another model.

    Raises:
        UserError: The checkpoint does not exist, or is not one of captioning.
    """
    if find_predictor_class(path) is not Captioner:
        raise UserError(f"task.captioner: {path} is a model for {task_of(path)}; give one for captioning, or null")
    captioner, options = Captioner(path, device=device), CaptionOptions(beam=BEAMS, results=BEAMS)

    def judge(images: Sequence[Image.Image]) -> list[list[str]]:
        if not images:
            return []
        texts = dict(captioner.results([[captioner.pixels(image) for image in images]], options))
        return [_select_likely(texts[place]) for place in range(len(images))]

    return judge


def _select_likely(texts: Sequence[Text]) -> list[str]:
    """The likeliest caption of a picture and those that are nearly as likely: a picture has several true captions."""
    return [text.text for text in texts if text.logprob >= texts[0].logprob + math.log(LIKELY)]


class TextToImageTask(Task):
    """Trains by next-token prediction of image tokens (Ramesh et al. 2021); validates on sampled pictures.

    Two judges look for the caption in each picture: a captioner, and for drawn scenes a program that reads objects and
    relations from the pixels. A picture is sampled by the sample's id, so that an evaluation can be repeated.

    Args:
        model, options: As in Task; fields are images, and text.
        temperature, top_k, guidance: How the pictures of evaluations are sampled, and those of the commands by default.
        val_texts: Captions that a validation draws; None for all.
        captioner: Checkpoint of the captioner that judges pictures; None for no such judge.
    """

    name = "text_to_image"
    headlines = (PIXELS, CAPTIONER)
    curves = (PIXELS, CAPTIONER)
    unit = "pictures"
    model: TextToImage

    def __init__(
        self,
        *,
        model: TextToImage,
        temperature: Annotated[float, Range(0)] = 1.0,
        top_k: Count | None = None,
        guidance: Annotated[float, Range(0, MAX_GUIDANCE)] = 1.0,
        val_texts: Count | None = None,
        captioner: str | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(model=model, **options)
        self.sampling = ImageSampling(sampling=Sampling(temperature=temperature, top_k=top_k), guidance=guidance)
        self.val_texts, self.captioner, self.metric = val_texts, find_captioner(captioner), DrawingMetric()
        self._judges: Mapping[str, Judge] | None = None
        self._drawn: dict[str, Tensor] = {}  # pictures of the last evaluation by id, on this process
        self._squares = [0.0, 0]  # sum of squared errors of the codebook's images, and number of values

    @property
    def image_field(self) -> ImageTokenField:
        field = self.fields["images"]
        assert isinstance(field, ImageTokenField)
        return field

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the captions."""
        return self.fields["text"].tokenizer  # type: ignore[return-value]

    def work(self, batch: Batch) -> Work:
        texts = batch["text"]
        read = (texts.tokens if texts.layout is None else texts.layout).shape[1]
        rows, length = batch["images"].tokens.shape
        return Work(rows=rows, length=length, read=read, packed=tuple(texts.tokens.shape))

    def loss(self, batch: Batch) -> dict[str, Term]:
        texts, tokens = batch["text"], batch["images"].tokens
        hidden = self.model(texts.tokens, tokens, texts.segments, texts.types, texts.layout)
        targets, smoothing = Targets(tokens.flatten(), None), self.label_smoothing
        return {"tokens": Term(*token_loss(hidden, targets, self.model.head_parts, label_smoothing=smoothing))}

    def on_evaluation_start(self) -> None:
        super().on_evaluation_start()
        self.pool, self._drawn, self._squares = StepperPool(), {}, [0.0, 0]
        if self._judges is None:
            self._judges = self._load_judges()

    def _load_judges(self) -> dict[str, Judge]:
        judges: dict[str, Judge] = {}
        source = self.data.source
        if isinstance(source, SceneSource):
            kinds = {"shapes": source.shapes, "colors": source.colors, "sizes": source.sizes}
            judges[PIXELS] = lambda images: [read_captions(image, **kinds) for image in images]
        if self.captioner is not None:
            judges[CAPTIONER] = load_captioner(self.captioner, self.device)
        return judges

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        """Adds a batch's loss and, up to `val_texts`, judged pictures; in a final evaluation also the controls'."""
        texts, images, model = batch["text"], batch["images"], self.model
        context = encode_descriptions(model, texts)
        with torch.autocast(self.device.type, enabled=False):
            hidden = model.read_tokens(images.tokens, context)
            sums, counts = row_losses(hidden, Targets(images.tokens.flatten(), None), model.head_parts)
        self.evaluation.add_loss({"tokens": Term(sums.sum(), counts.sum())})
        if not batch.ids or (not final and self.evaluation.has_samples(self.val_texts)):
            return
        rebuilt = self._rebuild(images)
        pictures = self._draw(context, batch.ids)
        captions = [
            (id, caption, references) for id, (caption, *references) in zip(batch.ids, texts.texts, strict=True)
        ]
        judged = self._judge(captions, pictures)
        self.metric.update(judged)
        for picture, pixels in zip(judged, pictures, strict=True):
            self._drawn[picture.id] = pixels
            line = f"{printable(picture.caption)} {_describe_findings(picture)}"
            self.evaluation.samples.append(
                {"id": picture.id, "caption": picture.caption, "image": pixels, "line": line}
            )
        if final:
            self.metric.update(self._judge(captions, rebuilt), CEILING)
            self.metric.update(self._judge(captions, self._random_images(batch.ids)), RANDOM)

    def _draw(self, context: Context, ids: Sequence[str]) -> Tensor:
        """Draws pictures of encoded captions: uint8 (B, 3, H, W)."""
        begin = [encode_text(self.tokenizer, self.fields["text"].max_len, "")]  # type: ignore[attr-defined]
        empty = encode_descriptions(
            self.model, input_rows([EncodedSample(begin)], self.tokenizer.pad_id).to(self.device)
        )
        decoder = self.model.decoder
        tokens = sample_image_tokens(decoder, context, self.sampling, empty=empty, ids=ids, pool=self.pool)
        return self.image_field.learned.decode(tokens).cpu()

    def _rebuild(self, images: ImageTokens) -> Tensor:
        """The images of a batch as the codebook rebuilds them; adds their errors to the evaluation's."""
        assert images.pixels is not None
        rebuilt = self.image_field.learned.decode(images.tokens)
        errors = rebuilt.double() - images.pixels.double()
        self._squares[0] += errors.square().sum().item()
        self._squares[1] += errors.numel()
        return rebuilt.cpu()

    def _random_images(self, ids: Sequence[str]) -> Tensor:
        """A random training image for each sample; the next one if it cannot be read."""
        train, images = self.data.split("train"), []
        for id in ids:
            first = key("random picture", id) % len(train)
            for place in range(len(train)):
                try:
                    image = train.record((first + place) % len(train)).image()
                except ImageError:
                    continue
                images.append(self.preprocess(image))
                break
        return torch.stack(images)

    def _judge(self, captions: Sequence[tuple[str, str, Sequence[str]]], pictures: Tensor) -> list[JudgedPicture]:
        """What the judges find in pictures of some captions, each with the id and the references of its sample."""
        images, judges = list(map(to_image, pictures)), self._judges or {}
        found = {name: judge(images) for name, judge in judges.items()}
        by_picture = [{name: found[name][place] for name in found} for place in range(len(images))]
        return [JudgedPicture(*caption, findings) for caption, findings in zip(captions, by_picture, strict=True)]

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        del self.pool  # frees the memory of recorded steps
        squares = torch.tensor(self._squares, dtype=widest_float(self.device), device=self.device)
        total, count = self.sum_over_ranks(squares).tolist()
        results = self.metric.compute()
        results |= {"codebook_error": (total / count) ** 0.5} if count else {}
        if final:
            results |= self.metric.controls() | self.metric.intervals(seed=self.seed)
        return results

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        return self.metric.scorers(metric, control)

    def notes(self) -> list[str]:
        judges = {
            PIXELS: "share of pictures whose objects and relations, read from the pixels, make the caption true",
            CAPTIONER: "share of pictures whose caption is among the likeliest that task.captioner finds in them",
        }
        lines = [f"({name}: {judges[name]})" for name in self.metric.judges]
        about = (
            "(ceiling: the same for the samples' own images, rebuilt by the codebook; codebook_error: root mean square"
        )
        return [*lines, f"{about} of their pixels' errors, of 255)", *super().notes()]

    def details(self) -> dict[str, JsonValue]:
        return {"pictures": self.metric.details()}

    def predictions(self) -> list[dict[str, Any]]:
        return [{"id": id, **picture} for id, picture in self.metric.details().items()]

    def report(self) -> list[Section]:
        """Pictures of random captions, and of captions that a judge does not find in them."""
        pictures = [picture for picture in self.metric.pictures if picture.id in self._drawn]
        wrong = [picture for picture in pictures if not all(map(picture.matches, picture.found))]
        kinds = {"Random captions": pick_samples(pictures), "Captions that a judge does not find": pick_samples(wrong)}
        sections = []
        for title, chosen in kinds.items():
            named = [(picture, to_image(self._drawn[picture.id])) for picture in chosen]
            shown = [
                (f"{picture.caption} {_describe_findings(picture)}", encode_png(enlarge(image, SHOWN_SIDE)))
                for picture, image in named
            ]
            if shown:
                sections.append(Section(title, [Note("The caption, and what the judges find."), Pictures(shown)]))
        return sections

    def description(self) -> dict[str, JsonValue]:
        sampling = {"temperature": self.sampling.sampling.temperature, "guidance": self.sampling.guidance}
        top_k = self.sampling.sampling.top_k
        drawing: dict[str, JsonValue] = {**sampling, **({} if top_k is None else {"top_k": top_k})}
        return {**super().description(), "drawing": drawing}

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        texts, images = batch["text"], batch["images"]
        shapes = f"{text_shape(texts.tokens, texts.segments)}, image tokens {' x '.join(map(str, images.tokens.shape))}"
        ids = [
            id for id, segment in zip(texts.tokens[0].tolist(), texts.segments[0].tolist(), strict=True) if segment == 1
        ]
        pieces = " ".join(repr(self.tokenizer.piece(id)) for id in ids[:tokens])
        codes = " ".join(map(str, images.tokens[0, :tokens].tolist()))
        return [
            f"batch       {shapes}",
            f"sample      {batch.ids[0]}",
            f"  reads     {pieces}",
            f"  writes    {codes} ...",
        ]

    def example(self, data: Data, folder: Path) -> str:
        caption = data.split(data.final_split).record(0)["captions"][0]
        return f"vlm draw --text {shlex.quote(caption)} --out pictures"


def _describe_findings(picture: JudgedPicture) -> str:
    """The judges' verdicts on a picture, with what they find if it is not the caption."""
    parts = []
    for judge, found in picture.found.items():
        name = judge.partition("_")[0]
        parts.append(f"{name}: {'right' if picture.matches(judge) else printable(found[0]) if found else 'nothing'}")
    return f"({'; '.join(parts)})" if parts else ""
