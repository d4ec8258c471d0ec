"""Parses the body of a request: images, texts and options from a form, from JSON, or one raw input."""

import base64
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import FormParser, parse_options_header
from starlette.exceptions import HTTPException

MAX_TEXT = 2**20  # bytes of a body without images
MAX_PARTS = 1024  # of a form
MAX_VALUES = 2**16  # of JSON; parsing millions would block all other requests
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # else it warns about each damaged form
BLANKS = "\t\n\f\r "  # ASCII white space
URL_ALPHABET = bytes.maketrans(b"-_", b"+/")
INPUTS = {"image": "image", "images": "image", "text": "text", "texts": "text"}


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
            main: Kind, image or text, of a body that is neither a form nor JSON, and of a form's file with another
                name.
        Raises:
            HTTPException: It is damaged, or too large.
        """
        kind = content_type.partition(";")[0].strip().lower()
        contents = cls()
        if kind == "multipart/form-data":
            contents._add_form(content_type, body, main)
        elif kind == "application/json":
            contents._add_json(body, main)
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
            known = self.options[name]
            self.options[name] = [*(known if isinstance(known, list) else [known]), value]
        else:
            self.options[name] = value

    def _add_form(self, content_type: str, body: bytearray, main: str) -> None:
        count = 0

        def take(part: Any, *, file: bool) -> None:
            nonlocal count
            count += 1
            if count > MAX_PARTS:
                raise HTTPException(413, f"the form has more than {MAX_PARTS:,} parts")
            name = (part.field_name or b"").decode(errors="replace")
            if file:
                part.file_object.seek(0)
                self._add(INPUTS.get(name, main), part.file_object.read())
            elif name in INPUTS:
                self._add(INPUTS[name], part.value or b"")
            else:
                self._add(name, (part.value or b"").decode(errors="replace"))

        takers = partial(take, file=False), partial(take, file=True)
        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if not boundary:
            raise HTTPException(400, "the form cannot be read: its header states no boundary")
        try:
            parser = FormParser(
                "multipart/form-data", *takers, boundary=boundary, config={"MAX_MEMORY_FILE_SIZE": len(body) + 1}
            )
            parser.write(bytes(body))
            parser.finalize()
        except FormParserError as fault:
            raise HTTPException(400, f"the form cannot be read: {fault}") from fault

    def _add_json(self, body: bytearray, main: str) -> None:
        try:
            content = as_json(body)
            for name, value in content.items():
                self._add_value(name, value)
            if not {main, f"{main}s"} & content.keys():
                raise KeyError(main)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as fault:
            example = f'{{"{main}s": [...]}}, images in base64'
            raise HTTPException(400, f"the body is not JSON such as {example}") from fault

    def _add_value(self, name: str, value: Any) -> None:
        kind = INPUTS.get(name)
        if kind is None:
            self._add(name, value)
            return
        if name != kind and not isinstance(value, list):
            raise TypeError(name)
        for one in [value] if name == kind else value:
            self._add(kind, _input(one, kind))


def _input(value: Any, kind: str) -> str | bytes:
    if not isinstance(value, str):
        raise TypeError(value)
    return decode_base64(value.encode()) if kind == "image" else value


def decode_base64(text: bytes) -> bytes:
    """Decodes base64 as browsers do (https://infra.spec.whatwg.org/#forgiving-base64-decode).

    White space may stand anywhere, and padding may be left out. The alphabet for URLs is accepted too, since its two
    letters, - and _, have no other meaning.

    Raises:
        ValueError: The text is not base64.
    """
    data = text.translate(URL_ALPHABET, BLANKS.encode())
    if len(data) % 4 == 0:
        data = data[: len(data) - (data.endswith(b"=") + data.endswith(b"=="))]
    if len(data) % 4 == 1 or b"=" in data:
        raise ValueError("its length or its padding is wrong")
    return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)


def as_json(body: bytes | bytearray, *, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parses a body of JSON.

    Args:
        object_hook: As in `json.loads`.
    Raises:
        HTTPException: It holds too many values.
        ValueError, RecursionError: It is damaged.
    """
    if len(body) > MAX_TEXT and sum(map(body.count, (b"[", b"{", b","))) > MAX_VALUES:
        raise HTTPException(413, f"the JSON has more than {MAX_VALUES:,} values")
    return json.loads(body, object_hook=object_hook)
