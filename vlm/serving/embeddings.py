"""Vectors of texts and images over HTTP, in the format of POST /v1/embeddings."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from PIL import Image

from vlm.data.text.inputs import Input
from vlm.errors import Range, UserError
from vlm.inference.command_options import EmbeddingOptions
from vlm.inference.options import build_options
from vlm.inference.predictor import Predictor
from vlm.inference.tasks import command_names
from vlm.serving.fields import LABELS, FieldTable, RequestError, bad_request, check_model, read_object
from vlm.serving.reader import BLANKS, MAX_TEXT, RequestImage, RequestReader, decode_data_url
from vlm.tasks.embedding.predict import Embedder
from vlm.untrusted.sizes import JsonValue

MAX_INPUTS = 2048
FIELDS = FieldTable(
    types={
        "model": str,
        "input": str | list[str] | list[int] | list[list[int]],
        "encoding_format": Literal["float", "base64"],
        "dimensions": Annotated[int, Range(1)],
    },
    labels=LABELS,
    neutral={"add_special_tokens": (True,), "priority": (0,)},  # of vLLM
)


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequest:
    """A request for vectors.

    Args:
        inputs: Texts and images as `Embedder.prepare` returned them.
        options: Options of the vectors.
        tokens: Number of tokens of the texts.
        in_base64: Whether vectors are written in base64.
    """

    inputs: Sequence[Any]
    options: EmbeddingOptions
    tokens: int
    in_base64: bool


class EmbeddingReader:
    """Reads requests for vectors.

    Args:
        embedder: The model.
        reader: The reader of /predict, which has the limits and the defaults.
        name: The name of the model.
        max_images: Maximum number of images of a request.
    """

    def __init__(self, embedder: Embedder, reader: RequestReader, name: str, *, max_images: int) -> None:
        self.embedder, self.reader, self.name, self.max_images = embedder, reader, name, max_images
        known = EmbeddingOptions.__dataclass_fields__
        defaults = {name: value for name, value in reader.defaults.items() if name in known}
        defaults |= {"batch_size": reader.rows}
        self.options = build_options(EmbeddingOptions, defaults, use="embed")

    @cached_property
    def width(self) -> int:
        """Number of values of a vector."""
        if self.embedder.text_encoder is not None:
            prepared: Any = self.embedder.prepare("a", self.options)
        else:
            prepared = self.embedder.pixels(Image.new("RGB", (1, 1)))
        (vector,) = self.embedder.predict([prepared], self.options)
        return len(vector)

    async def read(self, body: bytearray, *, deadline: float) -> EmbeddingRequest:
        """Reads a request from a body.

        Args:
            body: It is empty afterwards.
            deadline: Time at which the request stops waiting for the budget, by the event loop's clock.
        Raises:
            HTTPException: The body is invalid, or the budget is not available in time.
        """
        size, run = len(body), self.reader.run_in_budget
        content = await read_object(self.reader, body, deadline=deadline)
        FIELDS.check(content)
        check_model(content.get("model", self.name), self.name)
        if "dimensions" in content:
            await run(deadline, size, self._check_dimensions, content["dimensions"])
        prepared = await run(deadline, size, self._read_inputs, content)
        for place, item in enumerate(prepared):
            if isinstance(item, RequestImage):
                try:
                    prepared[place] = await run(deadline, item.cost, self.embedder.prepare, item, self.options)
                except UserError as fault:
                    raise _input_error(str(fault)) from fault
        return EmbeddingRequest(
            inputs=prepared,
            options=self.options,
            tokens=sum(len(item.ids) for item in prepared if isinstance(item, Input)),
            in_base64=content.get("encoding_format") == "base64",
        )

    def _check_dimensions(self, dimensions: int) -> None:
        if dimensions != self.width:
            line = f"dimensions: this model is not trained for shorter vectors; only {self.width} is supported"
            raise bad_request(f"{line}; remove the field", param="dimensions", code="unsupported_value")

    def _read_inputs(self, content: Mapping[str, Any]) -> list[Any]:
        """Returns texts prepared for the model, and images to decode."""
        value = content.get("input")
        if value is None or value == []:
            raise _input_error("input: send a text, token ids, or a list of texts or of token ids")
        single = isinstance(value, str) or isinstance(value[0], int)
        items = [value] if single else value
        if len(items) > MAX_INPUTS:
            raise _input_error(f"input: has {len(items):,} items; the maximum is {MAX_INPUTS:,}")
        if sum(len(item) for item in items if not self._is_image(item)) > MAX_TEXT:
            raise RequestError(413, f"input: has more than {MAX_TEXT:,} characters", param="input")
        if sum(map(self._is_image, items)) > self.max_images:
            raise _input_error(f"input: has more than {self.max_images:,} images; send fewer at a time")
        names = ["input"] if single else [f"input {number}" for number in range(1, len(items) + 1)]
        return [self._read_item(item, name) for item, name in zip(items, names, strict=True)]

    def _is_image(self, item: str | Sequence[int]) -> bool:
        """Returns True if an item is a data URL that the model reads as an image."""
        if self.embedder.image_encoder is None or not isinstance(item, str):
            return False
        return item[:32].strip(BLANKS)[:11].lower() == "data:image/"

    def _read_item(self, item: str | Sequence[int], name: str) -> RequestImage | Input:
        if self._is_image(item):
            assert isinstance(item, str)
            try:
                return RequestImage(decode_data_url(item), name, self.reader.min_side)
            except ValueError as fault:
                raise _input_error(f"{name}: the image is not valid base64") from fault
        if self.embedder.text_encoder is None:
            raise _input_error(f"{name}: this model embeds only images; send data URLs (data:image/jpeg;base64,...)")
        tokenizer, most = self.embedder.tokenizer, self.embedder.longest
        if isinstance(item, str):
            if any("\ud800" <= char <= "\udfff" for char in item):
                raise _input_error(f"{name}: the text is not UTF-8")
            ids = [*tokenizer.read_begin, *tokenizer.encode(item), tokenizer.eos_id]
        else:
            ids = list(item)
            if wrong := [token for token in ids if not 0 <= token < tokenizer.vocab_size]:
                line = f"{name}: {wrong[0]} is not the id of a token; ids are 0 to {tokenizer.vocab_size - 1}"
                raise _input_error(line)
        if not 0 < len(ids) <= most:
            line = f"{name}: has {len(ids):,} tokens; the model reads 1 to {most:,}"
            raise _input_error(line, code="context_length_exceeded" if ids else None)
        return Input(ids, [0] * len(ids))

    def format_object(self, request: EmbeddingRequest, vectors: Sequence[Sequence[float]]) -> bytes:
        """Returns the response's JSON."""
        data = [
            json.dumps({"object": "embedding", "index": place, "embedding": self._format_vector(request, vector)})
            for place, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": request.tokens, "total_tokens": request.tokens}
        end = json.dumps({"model": self.name, "usage": usage})[1:]
        return f'{{"object": "list", "data": [{", ".join(data)}], {end}'.encode()

    def _format_vector(self, request: EmbeddingRequest, vector: Sequence[float]) -> JsonValue:
        if not request.in_base64:
            return list(vector)
        return base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()


def _input_error(line: str, *, code: str | None = None) -> RequestError:
    return bad_request(line, param="input", code=code)


def find_embedder(predictor: Predictor) -> Embedder | None:
    """Returns the embedder of a predictor's model; None if its task has no command `embed`."""
    if isinstance(predictor, Embedder):
        return predictor
    return Embedder.with_same_model(predictor) if "embed" in command_names(predictor.model_task) else None
