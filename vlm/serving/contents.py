"""Parses the body of a request: images, texts and options from a form, from JSON, or one raw input."""

import base64
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import FormParser, parse_options_header
from starlette.exceptions import HTTPException

from vlm.errors import printable

MAX_TEXT = 2**20  # bytes of a body without images
MAX_PARTS = 1024  # of a form
MAX_VALUES = 2**16  # of JSON; parsing millions would block all other requests
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # else it warns about each damaged form
BLANKS = "\t\n\f\r "  # ASCII white space
URL_ALPHABET = bytes.maketrans(b"-_", b"+/")
MAX_FILE_NAME = 4096  # bytes of a form's text that may be meant as the name of a file
_URL_ENCODED = re.compile(rb"(images?|texts?)=")
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
            main: Kind, image or text, of a body that is neither a form nor JSON.
        Raises:
            HTTPException: It is damaged or too large, or a field does not hold what its name says.
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
        example = '{"images": ["BASE64", ...]}' if main == "image" else '{"texts": ["...", ...]}'
        try:
            content = as_json(body)
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


def _read_input(name: str, value: Any, kind: str) -> str | bytes:
    """Returns a text, or the bytes of an image that JSON holds in base64, with or without the head of a data URL.

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
        shown = value if len(value) <= 60 else f"{value[:57]}..."
        remedy = "send the file's content in base64 or as a data URL, or upload the file as a form"
        line = f"{name}: {json.dumps(shown)} is not base64; {remedy} (curl -F image=@FILE)"
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
