"""Reads request bodies: the inputs of a model, their other parts, and options."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, get_type_hints

from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from vlm.config.types import fits
from vlm.data.images.image import LARGE_PIXELS, MAX_PIXELS, ImageError, decoding_cost, load_image
from vlm.errors import UserError
from vlm.inference.inputs import default_workers
from vlm.inference.options import OF_DRAWS, as_list, checked, declared
from vlm.inference.predictor import Predictor
from vlm.inference.writing import note_width
from vlm.serving.budget import Budget
from vlm.serving.contents import Contents
from vlm.tasks.span_answering.predict import SpanAnswerer
from vlm.tasks.tagging.predict import Tagger
from vlm.tuning import return_freed_memory

FINER = 4  # a JPEG is decoded to at least this many times the pixels per side that the model sees
WINDOWS = 32  # most windows of a text times its questions, for models that read long texts in windows
MOST_COLUMNS = 64  # most texts of an input decoded in parallel, unless the service was started with more
MOST_ITEMS = {"question": 64, "": 1024}  # of an option that is a list
MOST_TOP = 100
MOST_NUMBER = 2**62


class Photo:
    """An image of a request; calling it decodes it.

    Attributes:
        cost: Number of pixels to decode.
    """

    def __init__(self, content: bytes, name: str, least: int | None) -> None:
        self._content, self._name, self._least = content, name, least
        self._fault: ImageError | None = None
        self.cost = 0
        try:
            self.cost = decoding_cost(content, name, least=least)
        except ImageError as fault:
            self._fault = fault

    def __call__(self) -> Image.Image:
        if self._fault is not None:
            raise self._fault
        return load_image(self._content, self._name, least=self._least)


class Read(NamedTuple):
    """The content of a request.

    Args:
        inputs: Inputs as `Predictor.prepare` returned them, or the UserErrors that it raised.
        options: The task's options.
        cut: Places of inputs that are truncated.
    """

    inputs: Sequence[Any]
    options: Any
    cut: set[int]


@dataclass
class Reader:
    """Reads requests for a model.

    Args:
        predictor: The model.
        defaults: Options, unless a request sets them.
        rows: Inputs computed at a time with the defaults.
    Raises:
        UserError: The defaults do not fit the model.
    """

    predictor: Predictor
    defaults: Mapping[str, Any]
    rows: int

    def __post_init__(self) -> None:
        kind, preprocess = self.predictor.options, getattr(self.predictor, "preprocess", None)
        self.least = None if preprocess is None else int(FINER * max(preprocess.image_size) / preprocess.crop)
        self.beside = {name: one.beside for name, one in declared(kind).items() if one.beside}
        unset = dict.fromkeys(self.beside)
        if unknown := [name for name in self.defaults if name not in declared(kind)]:
            raise UserError(
                f"--{unknown[0].replace('_', '-')}: a model for {self.predictor.trained_task} takes none; leave it out"
            )
        usual = kind(**{**unset, **self.defaults})
        self.predictor.check_options(usual)
        width = 1 if "question" in unset else self.predictor.width(usual)
        self.rows, self.columns = self.rows * width, max(MOST_COLUMNS, width)
        # One budget bounds the memory of decoding, up to 14 bytes a pixel, and of parsing, a few bytes per byte. It has
        # room for small images beside the largest one. Reading a text holds the GIL: if many were read at a time, each
        # step of the event loop, and so /health, would wait for all of them.
        places = max(2, default_workers())
        self.budget = Budget(MAX_PIXELS + places * LARGE_PIXELS, places=places)

    async def read(self, kind: str, body: bytearray, *, most: int, deadline: float) -> Read:
        """Reads a request from a body.

        Args:
            kind: The body's content type.
            body: It is empty afterwards.
            most: Most inputs of a request.
            deadline: When the request stops waiting for its turn, by the loop's clock.
        Raises:
            HTTPException: The body is invalid, or its turn does not come in time.
        """

        work = partial(self.work, deadline=deadline)
        inputs, options, faults = await work(len(body), self._open, kind, body, most)
        beside = sum(photo.cost for photo in photos(list(vars(options).values())))
        sources = await work(beside, self._sources, inputs, options)
        prepared, cut = list[Any](), set[int]()
        for place, source in enumerate(sources):
            if place in faults:
                prepared.append(faults[place])
                continue
            cost = sum(photo.cost for photo in photos([source]))
            value, whole = await work(cost, self._prepare, source, options)
            prepared.append(value)
            if not whole:
                cut.add(place)
        return Read(prepared, options, cut)

    async def work(self, cost: int, call: Callable[..., Any], *arguments: Any, deadline: float) -> Any:
        """Runs a call on a thread once the budget has room for its cost, in pixels or bytes; returns its result."""
        async with self.budget.take(cost, deadline=deadline):
            result = await run_in_threadpool(call, *arguments)
            if cost > LARGE_PIXELS:
                await run_in_threadpool(return_freed_memory)
            return result

    def _open(self, kind: str, body: bytearray, most: int) -> tuple[list[Any], Any, dict[int, UserError]]:
        """Returns the inputs of a body, its options, and the faults of texts by place."""
        main = self.predictor.arguments.kind
        contents = Contents.parse(kind, body, main=main)
        body.clear()
        images = [Photo(one, f"image {place}", self.least) for place, one in enumerate(contents.images, start=1)]
        inputs: list[Any] = list(images) if main == "image" else list(contents.texts)
        other, name = (contents.texts, "text") if main == "image" else (images, "image")
        values = dict(contents.options)
        if self.beside.get(name) == name and other:
            values[name] = other
        elif other or self.beside.get(name) == name:
            reason = "unknown to" if other else "missing; needed by"
            raise HTTPException(422, f"{name}: {reason} {self.predictor.trained_task}")
        if not 0 < len(inputs) <= most:
            raise HTTPException(422, f"{len(inputs)} inputs in a request; send 1 to {most}")
        options = self._options(values)
        faults: dict[int, UserError] = {}
        if main == "text":
            for place, text in enumerate(inputs):
                inputs[place], fault = self._text(place + 1, text, options)
                faults |= {} if fault is None else {place: fault}
        return inputs, options, faults

    def _options(self, values: Mapping[str, Any]) -> Any:
        """Converts values that a client sent to options.

        Raises:
            HTTPException: One is unknown, of another type, out of range, or does not fit the model.
        """
        kind = self.predictor.options
        try:
            hints = get_type_hints(kind, include_extras=True)
            values = {name: as_typed(value, hints.get(name)) for name, value in values.items()}
            for name, value in values.items():
                _check_size(name, value)
            values = {**_compatible(self.defaults, values), **values}
            options = checked(kind, values, use=self.predictor.trained_task, client=True)
            self.predictor.check_options(options)
            width = self.predictor.width(options)
            if width > self.columns:
                raise UserError(f"{width:,} texts of an input at a time are too many; {self.columns} are the most")
            room = getattr(getattr(self.predictor.model, "decoder", self.predictor.model), "max_len", None)
            if room and (getattr(options, "max_tokens", None) or 0) > room:
                raise UserError(f"max_tokens: a text has room for {room} tokens")
            return replace(options, batch_size=max(1, self.rows // width))
        except UserError as fault:
            raise HTTPException(422, str(fault)) from fault

    def _text(self, place: int, content: bytes | str, options: Any) -> tuple[str, UserError | None]:
        try:
            text = content.decode() if isinstance(content, bytes) else content
            text.encode()  # lone surrogates, which JSON can contain, are not text
        except UnicodeError:
            return "", UserError(f"text {place}: is not UTF-8", 1)
        if isinstance(self.predictor, Tagger | SpanAnswerer):
            questions = max(1, len(as_list(getattr(options, "question", ""))))  # the text is read again for each
            count, most = len(self.predictor.tokenizer.encode(text)), WINDOWS * self.predictor.max_len // questions
            if count > most:
                return "", UserError(f"text {place}: has {count:,} tokens; {most:,} are the most", 1)
        return text, None

    def _sources(self, inputs: Sequence[Any], options: Any) -> list[Any]:
        try:
            return self.predictor.sources(inputs, options)
        except ImageError:
            raise
        except UserError as fault:
            raise HTTPException(422, str(fault)) from fault

    def _prepare(self, source: Any, options: Any) -> tuple[Any, bool]:
        """Returns a source as the model takes it, or its fault, and whether it is read completely."""
        try:
            value = self.predictor.prepare(source, options)
            notes = [*self.predictor.notes([source], options)]
            return value, len(notes) <= len([*note_width(self.predictor.width(options))])
        except UserError as fault:
            return fault, True


def _compatible(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults without those of another way of decoding than the one that a request chooses."""
    beam, sample = given.get("beam"), given.get("sample")
    dropped: tuple[str, ...] = ()
    if sample is False or (isinstance(beam, int) and beam > 1):
        dropped += ("sample", *OF_DRAWS)
    if sample is True or beam == 1:
        dropped += ("beam", "length_penalty", "groups", "diversity")
    return {name: value for name, value in defaults.items() if name not in dropped}


def photos(value: Any) -> Iterator[Photo]:
    """Yields the images within lists and tuples."""
    if isinstance(value, Photo):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from photos(one)


def as_typed(value: Any, hint: Any) -> Any:
    """Converts a field of a form, which is text, to the type of its option."""
    if hint is None or not isinstance(value, str) or fits(value, hint):
        return value
    words = {"true": True, "false": False}
    forms = [words.get(value.lower()), _number(value, int), _number(value, float), [value]]
    return next((one for one in forms if one is not None and fits(one, hint)), value)


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        return None


def _check_size(name: str, value: Any) -> None:
    """Refuses values that would cost more than any use needs.

    Raises:
        UserError: The value is one of these.
    """
    most = MOST_ITEMS.get(name, MOST_ITEMS[""])
    if isinstance(value, list) and len(value) > most:
        raise UserError(f"{name}: has {len(value):,} items; {most:,} are the most")
    if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) < MOST_NUMBER):
        raise UserError(f"{name}: must be finite and less than {MOST_NUMBER}")
    if name == "top" and isinstance(value, int) and value > MOST_TOP:
        raise UserError(f"top: must be at most {MOST_TOP}")
