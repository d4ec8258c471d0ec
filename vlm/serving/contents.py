"""Parses the body of a request: images, texts and options from a form, from JSON, or one raw input."""

import base64
import json
import logging
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
    return base64.b64decode(value, validate=True) if kind == "image" else value


def as_json(body: bytes | bytearray) -> Any:
    """Parses a body of JSON.

    Raises:
        HTTPException: It holds too many values.
        ValueError, RecursionError: It is damaged.
    """
    if len(body) > MAX_TEXT and sum(map(body.count, (b"[", b"{", b","))) > MAX_VALUES:
        raise HTTPException(413, f"the JSON has more than {MAX_VALUES:,} values")
    return json.loads(body)
