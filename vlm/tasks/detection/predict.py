"""Detecting objects in images with a model that writes boxes as location tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vlm.checkpoint.stored import DecodingDefaults
from vlm.data.boxes import (
    SEPARATOR,
    LocationCodec,
    WrittenObject,
    find_locations,
    format_prompt,
    parse_objects,
    prompt_ids,
    view_codec,
)
from vlm.data.images.resize import Box
from vlm.data.images.view import View, box_area, clip_box
from vlm.data.text.prompt_form import refuse_marks
from vlm.data.text.tokenizer import Tokenizer
from vlm.data.text.tokenizer_base import MAX_LOCATIONS
from vlm.decoding.continuation import continue_texts
from vlm.decoding.loop import decode_batch
from vlm.decoding.options import Hypothesis
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError, did_you_mean, find_similar
from vlm.inference.arguments import ImageArguments
from vlm.inference.command_options import DetectionOptions
from vlm.inference.inputs import ImageSource, open_image
from vlm.inference.options import DecodingOptions, check_stored_decoding
from vlm.inference.predictor import BatchPredictor, Rows, Stored
from vlm.io.output import Record
from vlm.models.context import Context
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.tasks.captioning.predict import ImagePrompt, ImageTextPredictor, encode_pixels

FOLDER_TOKENS = 256  # default maximum number of tokens per image of a folder's model
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


Written = tuple[list[WrittenObject], int]  # the valid objects of a text, and the number of invalid ones
ImageToSearch = tuple[ImageSource, list[str]]  # an image, and the classes to find in it; none for all


class ViewedImage(NamedTuple):
    """An image as the model reads it, uint8 (3, H, W).

    Args:
        view: The map from its pixels.
        size: Its width and height.
        classes: The classes to find; none for all.
    """

    pixels: Tensor
    view: View
    size: tuple[int, int]
    classes: list[str]


@torch.inference_mode()
def write_objects(
    model: VisionLanguageModel,
    tokenizer: Tokenizer,
    context: Context,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    known: Sequence[str] = (),
) -> list[Written]:
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
    pairs = zip(tokens, logprobs, strict=True)
    return [_read_objects(tokenizer, tokenizer.location_ids, row, scores, known) for row, scores in pairs]


def _read_objects(
    tokenizer: Tokenizer,
    locations: range,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    known: Sequence[str] = (),
) -> Written:
    """The valid objects of a text, and the number of invalid ones.

    Args:
        locations, tokens, logprobs: See `parse_objects`.
        known: See `write_objects`.
    """
    found = list(parse_objects(tokenizer, locations, tokens, logprobs))
    valid = [item for item in found if item is not None and (not known or item.label in known)]
    return valid, len(found) - len(valid)


def place_objects(
    written: Written, codec: LocationCodec, view: View, size: tuple[int, int], min_score: float = 0.0
) -> DetectedObjects:
    """The objects of an image in its own pixels; one that is entirely outside counts as unparsed.

    Args:
        written: Objects as `write_objects` returned them.
        codec: Coordinates of the view as location tokens.
        view: What the model read of the image.
        size: Width and height of the image.
        min_score: Objects with a lower score are left out.
    """
    objects, unparsed = [], written[1]
    for item in written[0]:
        box: Box = clip_box(view.unmap_box(codec.decode(item.numbers)), (0, 0, *size))
        if box_area(box) > 0:
            objects.append(DetectedObject(item.label, exp(item.logprob), box))
        else:
            unparsed += 1
    confident = [item for item in objects if item.score >= min_score]
    return DetectedObjects(sorted(confident, key=lambda item: -item.score), unparsed)


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


class DetectionPredictor(BatchPredictor[Any, Any, DetectedObjects, DetectionOptions], ImageTextPredictor):
    """Base of predictors that detect objects; arguments as in Predictor.

    A source is an image with what to find in it.
    """

    result = DetectedObject
    returns = "A list of DetectedObject, most confident first"
    fields = RECORD
    options = DetectionOptions
    arguments = ImageArguments

    def answer(self, result: DetectedObjects, options: DetectionOptions) -> list[DetectedObject]:
        return result.objects

    def name_of(self, source: tuple[ImageSource, Any]) -> str:
        return str(source[0])

    def record(
        self,
        source: tuple[ImageSource, Any],
        result: DetectedObjects,
        options: DetectionOptions,
        *,
        form: str = "jsonl",
    ) -> Rows:
        """A record per object; an image without objects has one with an empty class and no box."""
        rows: list[Record] = []
        for item in result.objects:
            score, edges = item.score, list(item.box)
            if form == "text":
                score, edges = round(score, 4), [round(edge, 1) for edge in edges]
            rows.append(dict(zip(RECORD, (self.name_of(source), item.label, score, *edges), strict=True)))
        nothing = "" if form == "text" else None
        return rows or [{**dict.fromkeys(RECORD, nothing), "image": self.name_of(source), "label": ""}]

    def shortfalls(self, results: Sequence[DetectedObjects]) -> Iterator[str]:
        if count := sum(result.unparsed for result in results):
            total = count + sum(len(result.objects) for result in results)
            yield f"note: {count} of {total} objects: no valid box or class; they were left out"


class ObjectDetector(DetectionPredictor):
    """Detects the objects of images; arguments as in Predictor.

    Attributes:
        classes: The classes that the model was trained on.
    """

    task = "detection"
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
        self.build_prompt(options)
        classes = split_classes(options.find)
        return [(image, classes) for image in inputs]

    def prepare(self, source: ImageToSearch, options: DetectionOptions) -> ViewedImage:
        image = open_image(source[0])
        return ViewedImage(self.pixels(image), self.preprocess.view(image.size), image.size, source[1])

    def predict(self, batch: Sequence[ViewedImage], options: DetectionOptions) -> list[DetectedObjects]:
        pixels = torch.stack([image.pixels for image in batch]).to(self.device)
        written = write_objects(
            self.model,
            self.tokenizer,
            encode_pixels(self.model, self.preprocess, pixels),
            [prompt_ids(self.tokenizer, image.classes) for image in batch],
            max_tokens=options.max_tokens or self.max_tokens,
            known=self.classes,
        )
        codec = view_codec(self.preprocess.image_size, len(self.tokenizer.location_ids))
        found = []
        for image, items in zip(batch, written, strict=True):
            result = place_objects(items, codec, image.view, image.size, options.min_score)
            if image.classes:  # the model may write others
                result.objects = [item for item in result.objects if item.label in image.classes]
            found.append(result)
        return found


class PromptedImage(NamedTuple):
    """A prompt with an image inside it; the map from the image's pixels, and its width and height."""

    prompt: ImagePrompt
    view: View
    size: tuple[int, int]


class PromptedDetector(DetectionPredictor):
    """Detects objects with PaliGemma, whose prompt names their classes; arguments as in Predictor."""

    task = "captioning"
    stored: ClassVar[Stored] = {"decoding": check_stored_decoding}
    decoding: DecodingDefaults = DecodingDefaults()

    @cached_property
    def locations(self) -> range:
        """Ids of the location tokens; empty if there are none."""
        return find_locations(self.tokenizer)

    def check_options(self, options: DetectionOptions) -> None:
        if self.form is None or not self.locations:
            raise UserError("this model has no location tokens; use PaliGemma, or a model of task=detection")
        if not (classes := split_classes(options.find)):
            raise UserError('--find: missing; this model finds the classes that a prompt names, such as "dog; cat"')
        refuse_marks(self.tokenizer, SEPARATOR.join(classes))

    def sources(self, inputs: Sequence[ImageSource], options: DetectionOptions) -> list[tuple[ImageSource, list[str]]]:
        self.check_options(options)
        classes = split_classes(options.find)
        return [(image, classes) for image in inputs]

    def prepare(self, source: tuple[ImageSource, list[str]], options: DetectionOptions) -> PromptedImage:
        """Returns the prompt "detect A ; B" with the image.

        Raises:
            UserError: The prompt leaves no room for objects.
        """
        assert self.form is not None
        image = open_image(source[0])
        pixels, rows, columns = self.preprocess.views(image)
        prompt = format_prompt(source[1]).rstrip("\n")  # the form of its prompts has the line feed
        tokens = self.form.instruction(self.tokenizer, prompt, None, [(rows, columns)]).tokens
        if (room := self.model.decoder.max_len) <= len(tokens):
            raise UserError(
                f"--find: the prompt has {len(tokens)} tokens, and the model reads {room}; find fewer classes"
            )
        return PromptedImage(ImagePrompt(pixels, tokens), self.preprocess.view(image.size), image.size)

    def predict(self, batch: Sequence[PromptedImage], options: DetectionOptions) -> list[DetectedObjects]:
        codec = LocationCodec(self.preprocess.image_size[::-1], MAX_LOCATIONS, MAX_LOCATIONS)
        pairs = zip(batch, self.write(batch, options), strict=True)
        return [
            place_objects(
                _read_objects(self.tokenizer, self.locations, text.tokens, text.logprobs),
                codec,
                image.view,
                image.size,
                options.min_score,
            )
            for image, text in pairs
        ]

    @torch.inference_mode()
    def write(self, batch: Sequence[PromptedImage], options: DetectionOptions) -> list[Hypothesis]:
        """What the model writes about each image, without the end token."""
        room = self.model.decoder.max_len - max(len(image.prompt.tokens) for image in batch)
        chosen = DecodingOptions().resolve(self.decoding)  # as the folder states
        search = chosen.build_decoding(chosen.build_rules(self.tokenizer), sample=False)
        search = replace(search, max_tokens=min(options.max_tokens or FOLDER_TOKENS, room))
        bos_id, eos_id = self.tokenizer.bos_id, self.tokenizer.eos_id
        context = self.encode_prompts([image.prompt for image in batch])
        texts = decode_batch(self.model.decoder, context, search, bos_id=bos_id, eos_id=eos_id)
        ends = {eos_id, *search.ends}
        return [_cut_end(text, ends) for (text, *_) in texts]


def _cut_end(text: Hypothesis, ends: set[int]) -> Hypothesis:
    """A text without its end token."""
    count = len(text.tokens) - bool(text.tokens and text.tokens[-1] in ends)
    return replace(text, tokens=text.tokens[:count], logprobs=text.logprobs[:count])
