"""Parses the body of a request: the inputs of a model, further parts such as questions, and options."""

import base64
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, ParamSpec, TypeVar, get_type_hints
from urllib.parse import unquote_to_bytes

from PIL import Image
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File, FormParser, parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from vlm.config.tree import Value
from vlm.config.types import fits
from vlm.data.images.image import LARGE_PIXELS, MAX_PIXELS, ImageError, count_decoded_pixels, load_image
from vlm.errors import UserError, printable
from vlm.inference.inputs import default_workers
from vlm.inference.options import SAMPLING_NAMES, Options, as_list, build_options, get_options
from vlm.inference.predictor import Predictor
from vlm.inference.writing import note_width
from vlm.machine import return_freed_memory
from vlm.serving.server import Budget
from vlm.tasks.span_answering.predict import SpanAnswerer
from vlm.tasks.tagging.predict import Tagger
from vlm.untrusted.sizes import JsonValue

MAX_TEXT = 2**20  # bytes of a body without images
MAX_PARTS = 1024  # of a form
MAX_VALUES = 2**16  # of JSON; parsing millions of values would block all other requests
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # else it warns about each damaged form
BLANKS = "\t\n\f\r "  # ASCII white space
URL_ALPHABET = bytes.maketrans(b"-_", b"+/")
MAX_FILE_NAME = 4096  # maximum bytes of a text field that is reported as a file name
_URL_ENCODED = re.compile(rb"(images?|texts?)=")
INPUTS = {"image": "image", "images": "image", "text": "text", "texts": "text"}
P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Contents:
    """The content of a request.

    Args:
        images: Bytes of image files.
        texts: Texts, as str or bytes.
        options: Further fields by name; a list if a field is repeated.
    """

    images: list[bytes] = field(default_factory=list)
    texts: list[str | bytes] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, content_type: str, body: bytearray, *, main: str) -> "Contents":
        """Parses a body.

        Args:
            main: Kind of input, image or text, of a body that is neither a form nor JSON.
        Raises:
            HTTPException: The body is damaged or too large, or a field has the wrong type.
        """
        kind = content_type.partition(";")[0].strip().lower()
        contents = cls()
        if kind == "multipart/form-data":
            contents._add_form(content_type, body, main)
        elif kind == "application/json":
            contents._add_json(body, main)
        elif kind == "application/x-www-form-urlencoded" and _URL_ENCODED.match(body):  # curl -d text=...
            line = f"URL-encoded forms are not supported; send a multipart form (curl -F {main}=...) or JSON"
            raise HTTPException(415, line)
        else:
            contents._add(main, bytes(body))
        if not contents.images and len(body) > MAX_TEXT:
            raise HTTPException(413, f"the body has no image and more than {MAX_TEXT:,} bytes")
        return contents

    def _add(self, name: str, value: Any) -> None:
        if name == "image":
            self.images.append(value)
        elif name == "text":
            self.texts.append(value)
        elif name in self.options:
            self.options[name] = [*as_list(self.options[name]), value]
        else:
            self.options[name] = value

    def _add_form(self, content_type: str, body: bytearray, main: str) -> None:
        count = 0

        def take(part: Field | File) -> None:
            nonlocal count
            count += 1
            if count > MAX_PARTS:
                raise HTTPException(413, f"the form has more than {MAX_PARTS:,} parts")
            name = (part.field_name or b"").decode(errors="replace")
            if isinstance(part, File):
                if name not in INPUTS:
                    line = f"is not a field for files; upload a file as {main} (curl -F {main}=@FILE)"
                    raise HTTPException(422, f"{printable(name)[:60]}: {line}")
                part.file_object.seek(0)
                self._add(INPUTS[name], part.file_object.read())
            elif name in INPUTS:
                value = part.value or b""
                if INPUTS[name] == "image" and len(value) < MAX_FILE_NAME and value.isascii():
                    line = f"expected a file, not the text {value.decode()!r:.60}; upload it with curl -F {name}=@FILE"
                    raise HTTPException(400, f"{name}: {line}")
                self._add(INPUTS[name], value)
            else:
                self._add(name, (part.value or b"").decode(errors="replace"))

        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if not boundary:
            raise HTTPException(400, "the form cannot be read: the Content-Type header has no boundary")
        try:
            in_memory = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}
            parser = FormParser("multipart/form-data", take, take, boundary=boundary, config=in_memory)
            parser.write(bytes(body))
            parser.finalize()
        except FormParserError as fault:
            raise HTTPException(400, f"the form cannot be read: {fault}") from fault

    def _add_json(self, body: bytearray, main: str) -> None:
        example = '{"images": ["BASE64", ...]}' if main == "image" else '{"texts": ["...", ...]}'
        try:
            content = parse_json(body)
        except (ValueError, RecursionError) as fault:
            raise HTTPException(400, f"the body is not valid JSON; send {example}") from fault
        if not isinstance(content, dict):
            raise HTTPException(400, f"the JSON is not an object; send {example}")
        for name, value in content.items():
            kind = INPUTS.get(name)
            if kind is None:
                self._add(name, value)
            elif name == kind:
                self._add(kind, _read_input(name, value, kind))
            elif isinstance(value, list):
                for place, item in enumerate(value, start=1):
                    self._add(kind, _read_input(f"{name}: item {place}", item, kind))
            else:
                raise HTTPException(400, f"{name}: expected a list of strings; {kind} takes one string")
        if not {main, f"{main}s"} & content.keys():
            raise HTTPException(400, f"the JSON has neither {main} nor {main}s; send {example}")


def _read_input(name: str, value: JsonValue, kind: str) -> str | bytes:
    """Returns a text, or the bytes of an image from base64 or a data URL.

    Raises:
        HTTPException: The value is something else.
    """
    if not isinstance(value, str):
        raise HTTPException(400, f"{name}: expected a string{', an image in base64' if kind == 'image' else ''}")
    if kind == "text":
        return value
    try:
        return decode_data_url(value) if value.strip(BLANKS)[:5].lower() == "data:" else decode_base64(value.encode())
    except ValueError as fault:
        quoted = value if len(value) <= 60 else f"{value[:57]}..."
        remedy = "send the file's content in base64 or as a data URL, or upload the file as a form"
        line = f"{name}: {json.dumps(quoted)} is not base64; {remedy} (curl -F image=@FILE)"
        raise HTTPException(400, line) from fault


def decode_data_url(url: str) -> bytes:
    """Decodes a URL such as data:image/png;base64,...

    Raises:
        ValueError: It is not a data URL in base64.
    """
    head, _, data = url.strip(BLANKS).partition(",")
    if re.fullmatch(r"data:.*; *base64", head, re.IGNORECASE | re.DOTALL) is None:
        raise ValueError("it does not begin with data:...;base64,")
    return decode_base64(unquote_to_bytes(data))


def decode_base64(text: bytes) -> bytes:
    """Decodes base64 as browsers do (https://infra.spec.whatwg.org/#forgiving-base64-decode).

    White space is ignored and padding is optional. The URL-safe alphabet is accepted too, since its two characters,
    - and _, have no other meaning.

    Raises:
        ValueError: The text is not base64.
    """
    data = text.translate(URL_ALPHABET, BLANKS.encode())
    if len(data) % 4 == 0:
        data = data[: len(data) - (data.endswith(b"=") + data.endswith(b"=="))]
    if len(data) % 4 == 1 or b"=" in data:
        raise ValueError("its length or its padding is wrong")
    return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)


def parse_json(body: bytearray, *, object_hook: Callable[[dict[str, JsonValue]], JsonValue] | None = None) -> JsonValue:
    """Parses a body of JSON.

    Args:
        object_hook: As in `json.loads`.
    Raises:
        HTTPException: It contains too many values.
        ValueError, RecursionError: It is damaged.
    """
    if len(body) > MAX_TEXT and sum(map(body.count, (b"[", b"{", b","))) > MAX_VALUES:
        raise HTTPException(413, f"the JSON has more than {MAX_VALUES:,} values")
    return json.loads(body, object_hook=object_hook)


JPEG_OVERSAMPLING = 4  # a JPEG is decoded to at least this many times the model's image size
MAX_WINDOWS = 32  # maximum of windows x questions of a text, for models that read long texts in windows
MAX_COLUMNS = 64  # maximum number of texts per input decoded in parallel, unless the service was started with more
MAX_ITEMS = {"question": 64, "": 1024}  # of an option that is a list
MAX_TOP = 100
MAX_NUMBER = 2**62


class RequestImage:
    """An encoded image of a request; a call decodes it.

    Attributes:
        cost: Number of pixels to decode.
    """

    def __init__(self, content: bytes, name: str, least: int | None) -> None:
        self._content, self._name, self._least = content, name, least
        self._fault: ImageError | None = None
        self.cost = 0
        try:
            self.cost = count_decoded_pixels(content, name, min_side=least)
        except ImageError as fault:
            self._fault = fault

    def __call__(self) -> Image.Image:
        if self._fault is not None:
            raise self._fault
        return load_image(self._content, self._name, min_side=self._least)


class ParsedRequest(NamedTuple):
    """The content of a request.

    Args:
        inputs: Inputs as `Predictor.prepare` returned them, or the UserErrors that it raised.
        options: The task's options.
        truncated: Indices of truncated inputs.
    """

    inputs: Sequence[Any]
    options: Options
    truncated: set[int]


@dataclass
class RequestReader:
    """Reads requests for a model.

    Args:
        predictor: The model.
        defaults: Options, unless a request sets them.
        rows: Number of inputs computed at the same time with the default options.
    Raises:
        UserError: The defaults do not fit the model.
    """

    predictor: Predictor
    defaults: Mapping[str, JsonValue]
    rows: int

    def __post_init__(self) -> None:
        kind, preprocess = self.predictor.options, getattr(self.predictor, "preprocess", None)
        side = None if preprocess is None else JPEG_OVERSAMPLING * max(preprocess.image_size) / preprocess.crop
        self.min_side = None if side is None else int(side)
        self.input_parts = {name: option.input_kind for name, option in get_options(kind).items() if option.input_kind}
        unset = dict.fromkeys(self.input_parts)
        if unknown := [name for name in self.defaults if name not in get_options(kind)]:
            option, task = unknown[0].replace("_", "-"), self.predictor.trained_task
            raise UserError(f"--{option}: not supported by a model for {task}; remove it")
        usual = kind(**{**unset, **self.defaults})
        self.predictor.check_options(usual)
        width = 1 if "question" in unset else self.predictor.width(usual)
        self.rows, self.max_columns = self.rows * width, max(MAX_COLUMNS, width)
        # One budget bounds the memory of decoding, up to 14 bytes per pixel, and of parsing, a few bytes per byte. It
        # fits small images next to the largest one. Reading a text holds the GIL: if many were read at the same time,
        # each step of the event loop, and so /health, would wait for all of them.
        places = max(2, default_workers())
        self.budget = Budget(MAX_PIXELS + places * LARGE_PIXELS, slots=places)

    async def read(self, kind: str, body: bytearray, *, most: int, deadline: float) -> ParsedRequest:
        """Reads a request from a body.

        Args:
            kind: The body's content type.
            body: It is empty afterwards.
            most: Maximum number of inputs of a request.
            deadline: Time at which the request stops waiting for the budget, by the event loop's clock.
        Raises:
            HTTPException: The body is invalid, or the budget is not available in time.
        """
        inputs, options, faults = await self.run_in_budget(deadline, len(body), self._parse_body, kind, body, most)
        cost = sum(photo.cost for photo in iter_images(list(vars(options).values())))
        try:
            sources = await self.run_in_budget(deadline, cost, self.predictor.sources, inputs, options)
        except ImageError:
            raise
        except UserError as fault:
            raise HTTPException(422, str(fault)) from fault
        prepared, truncated = list[Any](), set[int]()
        for place, source in enumerate(sources):
            if place in faults:
                prepared.append(faults[place])
                continue
            cost = sum(photo.cost for photo in iter_images([source]))
            value, is_complete = await self.run_in_budget(deadline, cost, self._prepare_source, source, options)
            prepared.append(value)
            if not is_complete:
                truncated.add(place)
        return ParsedRequest(prepared, options, truncated)

    async def run_in_budget(
        self, deadline: float, cost: int, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs a call on a thread when the budget allows its cost, in pixels or bytes; returns its result."""
        async with self.budget.acquire(cost, deadline=deadline):
            result = await run_in_threadpool(call, *args, **kwargs)
            if cost > LARGE_PIXELS:
                await run_in_threadpool(return_freed_memory)
            return result

    def _parse_body(self, kind: str, body: bytearray, most: int) -> tuple[list[Any], Options, dict[int, UserError]]:
        """Returns the inputs of a body, its options, and the errors of texts by index."""
        main = self.predictor.arguments.kind
        contents = Contents.parse(kind, body, main=main)
        body.clear()
        images = [RequestImage(data, f"image {n}", self.min_side) for n, data in enumerate(contents.images, start=1)]
        inputs: list[Any] = list(images) if main == "image" else list(contents.texts)
        extra_inputs, name = (contents.texts, "text") if main == "image" else (images, "image")
        values: dict[str, Any] = dict(contents.options)
        if self.input_parts.get(name) == name and extra_inputs:
            values[name] = extra_inputs
        elif extra_inputs or self.input_parts.get(name) == name:
            reason = "unknown to" if extra_inputs else "missing; needed by"
            raise HTTPException(422, f"{name}: {reason} {self.predictor.trained_task}")
        if not 0 < len(inputs) <= most:
            raise HTTPException(422, f"{len(inputs)} inputs in a request; send 1 to {most}")
        options = self._read_options(values)
        faults: dict[int, UserError] = {}
        if main == "text":
            for place, text in enumerate(inputs):
                inputs[place], fault = self._check_text(place + 1, text, options)
                faults |= {} if fault is None else {place: fault}
        return inputs, options, faults

    def _read_options(self, values: dict[str, Any]) -> Options:
        """Converts values that a client sent to options.

        Raises:
            HTTPException: An option is unknown, of another type, out of range, or not supported by the model.
        """
        kind = self.predictor.options
        try:
            hints = get_type_hints(kind, include_extras=True)
            for name, value in values.items():
                if isinstance(value, str) and name in hints and not fits(value, hints[name]):  # of a form
                    values[name] = next((form for form in _text_values(value) if fits(form, hints[name])), value)
                _check_size(name, values[name])
            values = _compatible_defaults(self.defaults, values) | values
            options = build_options(kind, values, use=self.predictor.trained_task, client=True)
            self.predictor.check_options(options)
            width = self.predictor.width(options)
            if width > self.max_columns:
                raise UserError(f"{width:,} texts per input exceed the maximum of {self.max_columns}")
            room = getattr(getattr(self.predictor.model, "decoder", self.predictor.model), "max_len", None)
            if room and (getattr(options, "max_tokens", None) or 0) > room:
                raise UserError(f"max_tokens: exceeds the maximum of {room} tokens per text")
            return replace(options, batch_size=max(1, self.rows // width))
        except UserError as fault:
            raise HTTPException(422, str(fault)) from fault

    def _check_text(self, place: int, content: bytes | str, options: Options) -> tuple[str, UserError | None]:
        try:
            text = content.decode() if isinstance(content, bytes) else content
            text.encode()  # lone surrogates, which JSON can contain, are not text
        except UnicodeError:
            return "", UserError(f"text {place}: is not UTF-8", 1)
        if isinstance(self.predictor, Tagger | SpanAnswerer):
            questions = max(1, len(as_list(getattr(options, "question", ""))))  # the text is read again for each
            count, most = len(self.predictor.tokenizer.encode(text)), MAX_WINDOWS * self.predictor.max_len // questions
            if count > most:
                return "", UserError(f"text {place}: has {count:,} tokens; the maximum is {most:,}", 1)
        return text, None

    def _prepare_source(self, source: Any, options: Options) -> tuple[Any, bool]:
        """Returns a source prepared for the model, or its error, and whether it is not truncated."""
        try:
            value = self.predictor.prepare(source, options)
            notes = [*self.predictor.notes([source], options)]
            return value, len(notes) <= len([*note_width(self.predictor.width(options))])
        except UserError as fault:
            return fault, True


def _compatible_defaults(defaults: Mapping[str, JsonValue], given: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns the defaults without those that do not apply to the decoding mode that a request chooses."""
    beam, sample = given.get("beam"), given.get("sample")
    dropped: tuple[str, ...] = ()
    if sample is False or (isinstance(beam, int) and beam > 1):
        dropped += ("sample", *SAMPLING_NAMES)
    if sample is True or beam == 1:
        dropped += ("beam", "length_penalty", "groups", "diversity")
    return {name: value for name, value in defaults.items() if name not in dropped}


def iter_images(value: object) -> Iterator[RequestImage]:
    """Yields the images within lists and tuples."""
    if isinstance(value, RequestImage):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iter_images(item)


def _text_values(text: str) -> Iterator[Value]:
    """Yields the values that a field of a form, which is text, can stand for."""
    if text.lower() in ("true", "false"):
        yield text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            yield kind(text)
    yield [text]


def _check_size(name: str, value: JsonValue) -> None:
    """Rejects values that would take excessive memory or time.

    Raises:
        UserError: The value is too large.
    """
    most = MAX_ITEMS.get(name, MAX_ITEMS[""])
    if isinstance(value, list) and len(value) > most:
        raise UserError(f"{name}: has {len(value):,} items; the maximum is {most:,}")
    if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) < MAX_NUMBER):
        raise UserError(f"{name}: must be finite and less than {MAX_NUMBER}")
    if name == "top" and isinstance(value, int) and value > MAX_TOP:
        raise UserError(f"top: must be at most {MAX_TOP}")
