"""Detecting objects in images with a model that writes boxes as location tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vlm.data.boxes import LocationCodec, WrittenObject, parse_objects, prompt_ids, view_codec
from vlm.data.images.resize import Box
from vlm.data.images.view import View, box_area, clip_box
from vlm.data.text.tokenizer import Tokenizer
from vlm.decoding.continuation import continue_texts
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError, did_you_mean, find_similar
from vlm.inference.arguments import ImageArguments
from vlm.inference.command_options import DetectionOptions
from vlm.inference.inputs import ImageSource, open_image
from vlm.inference.predictor import BatchPredictor, Rows, Stored
from vlm.io.output import Record
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.tasks.captioning.predict import ImageTextPredictor, encode_pixels

RECORD = ("image", "label", "score", "left", "top", "right", "bottom")


@dataclass
class DetectedObject:
    """An object in an image.

    Args:
        label: Its class.
        score: Product of the probabilities of its class and location tokens.
        box: Left, top, right and bottom edge, in pixels of the image.
    """

    label: str
    score: float
    box: tuple[float, float, float, float]


@dataclass
class DetectedObjects:
    """The objects of an image, most confident first.

    Args:
        objects: The objects.
        unparsed: Number of objects that the model wrote without a valid box or class.
    """

    objects: list[DetectedObject]
    unparsed: int = 0


ImageToSearch = tuple[ImageSource, list[int]]  # an image, and token ids of what to find in it


class ViewedImage(NamedTuple):
    """An image as the model reads it, uint8 (3, H, W).

    Args:
        view: The map from its pixels.
        size: Its width and height.
        prompt: Token ids of what to find.
    """

    pixels: Tensor
    view: View
    size: tuple[int, int]
    prompt: list[int]


@torch.inference_mode()
def write_objects(
    model: VisionLanguageModel,
    tokenizer: Tokenizer,
    context: Context,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    known: Sequence[str] = (),
) -> list[tuple[list[WrittenObject], int]]:
    """Returns the objects that a model writes about each image by greedy decoding, and the number of invalid ones.

    Args:
        context: The encoded images, one row each.
        prompts: Token ids of what to find in each image.
        known: All classes; an object of another class is invalid. By default, any text is a class.
    """
    tokens, logprobs = [[list[Any]() for _ in prompts] for _ in range(2)]
    room = model.decoder.max_len - max(map(len, prompts), default=0)
    with torch.autocast(context.states.device.type, enabled=False):  # as in answer_questions
        for step in continue_texts(
            model.decoder,
            prompts,
            context=context,
            eos_id=tokenizer.eos_id,
            sampling=Sampling(temperature=0.0),
            max_tokens=min(max_tokens, room),
            seed=0,
        ):
            for item in step:
                if item.token != tokenizer.eos_id:
                    tokens[item.prompt].append(item.token)
                    logprobs[item.prompt].append(item.logprob)
    written = []
    for row, scores in zip(tokens, logprobs, strict=True):
        found = list(parse_objects(tokenizer, tokenizer.location_ids, row, scores))
        valid = [item for item in found if item is not None and (not known or item.label in known)]
        written.append((valid, len(found) - len(valid)))
    return written


def place_objects(
    written: tuple[Sequence[WrittenObject], int], codec: LocationCodec, view: View, size: tuple[int, int]
) -> DetectedObjects:
    """The objects of an image in its own pixels; one that is entirely outside counts as unparsed.

    Args:
        written: Objects as `write_objects` returned them.
        codec: Coordinates of the view as location tokens.
        view: What the model read of the image.
        size: Width and height of the image.
    """
    objects, unparsed = [], written[1]
    for item in written[0]:
        box: Box = clip_box(view.unmap_box(codec.decode(item.numbers)), (0, 0, *size))
        if box_area(box) > 0:
            objects.append(DetectedObject(item.label, exp(item.logprob), box))
        else:
            unparsed += 1
    return DetectedObjects(sorted(objects, key=lambda item: -item.score), unparsed)


def split_classes(find: str | None) -> list[str]:
    """Returns the classes of --find, which semicolons separate; empty for all.

    Raises:
        UserError: It names none.
    """
    if find is None:
        return []
    classes = list(dict.fromkeys(filter(None, (" ".join(name.split()) for name in find.split(";")))))
    if not classes:
        raise UserError('--find: names no class; give some separated by semicolons, such as "red circle; blue cross"')
    return classes


class ObjectDetector(
    BatchPredictor[ImageToSearch, ViewedImage, DetectedObjects, DetectionOptions],
    ImageTextPredictor,
):
    """Detects the objects of images; arguments as in Predictor.

    Attributes:
        classes: The classes that the model was trained on.
    """

    result = DetectedObject
    returns = "A list of DetectedObject, most confident first"
    task = "detection"
    fields = RECORD
    options = DetectionOptions
    arguments = ImageArguments
    stored: ClassVar[Stored] = {"max_tokens": int, "classes": list}
    max_tokens: int
    classes: list[str]

    def check(self) -> None:
        super().check()
        if not self.tokenizer.location_ids:
            raise UserError("the checkpoint's tokenizer has no location tokens; use another copy of it")

    def check_options(self, options: DetectionOptions) -> None:
        self.build_prompt(options)

    def build_prompt(self, options: DetectionOptions) -> list[int]:
        """Returns token ids of what to find.

        Raises:
            UserError: A class is unknown to the model, or there are too many.
        """
        classes = split_classes(options.find)
        if unknown := [name for name in classes if name not in self.classes]:
            near = did_you_mean(find_similar(unknown[0], self.classes))
            some = ", ".join(self.classes[:10]) + (" ..." if len(self.classes) > 10 else "")
            raise UserError(f"--find {unknown[0]}: not a class of this model; it has {some}{near}")
        prompt = prompt_ids(self.tokenizer, classes)
        if len(prompt) > self.model.decoder.max_len // 2:
            raise UserError(f"--find: {len(classes)} classes are more than the model reads; find some at a time")
        return prompt

    def sources(self, inputs: Sequence[ImageSource], options: DetectionOptions) -> list[ImageToSearch]:
        prompt = self.build_prompt(options)
        return [(image, prompt) for image in inputs]

    def prepare(self, source: ImageToSearch, options: DetectionOptions) -> ViewedImage:
        image = open_image(source[0])
        return ViewedImage(self.pixels(image), self.preprocess.view(image.size), image.size, source[1])

    def predict(self, batch: Sequence[ViewedImage], options: DetectionOptions) -> list[DetectedObjects]:
        pixels = torch.stack([image.pixels for image in batch]).to(self.device)
        context = encode_pixels(self.model, self.preprocess, pixels)
        written = write_objects(
            self.model,
            self.tokenizer,
            context,
            [image.prompt for image in batch],
            max_tokens=self.max_tokens,
            known=self.classes,
        )
        codec = view_codec(self.preprocess.image_size, len(self.tokenizer.location_ids))
        found = []
        for image, items in zip(batch, written, strict=True):
            result = place_objects(items, codec, image.view, image.size)
            result.objects = [item for item in result.objects if item.score >= options.min_score]
            found.append(result)
        return found

    def answer(self, result: DetectedObjects, options: DetectionOptions) -> list[DetectedObject]:
        return result.objects

    def name_of(self, source: ImageToSearch) -> str:
        return str(source[0])

    def record(
        self, source: ImageToSearch, result: DetectedObjects, options: DetectionOptions, *, form: str = "jsonl"
    ) -> Rows:
        return object_records(self.name_of(source), result, form)

    def shortfalls(self, results: Sequence[DetectedObjects]) -> Iterator[str]:
        yield from count_unparsed(results)


def object_records(name: str, result: DetectedObjects, form: str) -> Rows:
    """Returns a record per object of an image; an image without objects has one with an empty class and no box."""
    rows: list[Record] = []
    for item in result.objects:
        score, edges = item.score, list(item.box)
        if form == "text":
            score, edges = round(score, 4), [round(edge, 1) for edge in edges]
        rows.append(dict(zip(RECORD, (name, item.label, score, *edges), strict=True)))
    nothing = "" if form == "text" else None
    return rows or [{**dict.fromkeys(RECORD, nothing), "image": name, "label": ""}]


def count_unparsed(results: Sequence[DetectedObjects]) -> Iterator[str]:
    """Yields a line on the objects that were written without a valid box or class, if there are some."""
    if count := sum(result.unparsed for result in results):
        total = count + sum(len(result.objects) for result in results)
        yield f"note: {count} of {total} objects: no valid box or class; they were left out"
