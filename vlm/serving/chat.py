"""Conversations over HTTP, in the format of POST /v1/chat/completions that many clients support."""

import asyncio
import base64
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple
from uuid import uuid4

from starlette.exceptions import HTTPException

from vlm.config.types import fits
from vlm.data.text.conversation import Role, Turn
from vlm.errors import UserError, printable
from vlm.inference.options import checked
from vlm.serving.contents import MAX_TEXT, as_json
from vlm.serving.events import FAILED, growth
from vlm.serving.job import Texts
from vlm.serving.reader import Photo, Reader, photos
from vlm.tasks.chat.predictor import ChatOptions, ChatPredictor, Prompt, Said, full, shown, spoken

MOST_TURNS = 1024
MOST_STOPS = 16
LONGEST_STOP = 256  # characters
ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Fields of a request, with the names of vlm's options.
OPTIONS = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
}
DRAWS = ("temperature", "top_p", "top_k", "min_p")
# Fields with the values that change nothing; a request with other values is refused.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "tools": ([],),
}
KNOWN = ("model", "messages", "stream", "stream_options", "user")


class Asked(NamedTuple):
    """A request.

    Args:
        prompt: The conversation as the model reads it.
        options: Options of the answer.
        stream: Whether the answer is streamed.
        counted: Whether the stream ends with the numbers of tokens.
    """

    prompt: Prompt
    options: ChatOptions
    stream: bool
    counted: bool


class ChatReader:
    """Reads conversations from requests.

    Args:
        predictor: The model.
        reader: The service's reader, whose limits apply here too.
        name: The name of the model.
    """

    def __init__(self, predictor: ChatPredictor, reader: Reader, name: str) -> None:
        self.predictor, self.reader, self.name = predictor, reader, name
        own = ChatOptions.__dataclass_fields__
        self.defaults = {name: value for name, value in reader.defaults.items() if name in own}

    async def read(self, body: bytearray, *, deadline: float) -> Asked:
        """Reads a request from a body.

        Args:
            body: It is empty afterwards.
            deadline: When the request stops waiting for its turn, by the loop's clock.
        Raises:
            HTTPException: The body is invalid, or its turn does not come in time.
            UserError: The model cannot read its content.
        """
        size = len(body)
        try:
            content = await self.reader.work(size, as_json, body, deadline=deadline)
        except (ValueError, RecursionError) as fault:
            raise _refused("the body is not JSON") from fault
        body.clear()
        if not isinstance(content, dict):
            raise _refused("the body is no JSON object")
        options = self._options(content)
        source = await self.reader.work(size, self._conversation, content, deadline=deadline)
        cost = sum(photo.cost for said in source for photo in photos(list(said.images)))
        prompt = await self.reader.work(cost, self.predictor.prepare, source, options, deadline=deadline)
        wanted = content.get("stream_options") or {}
        return Asked(prompt, options, bool(content.get("stream")), bool(wanted.get("include_usage")))

    def _options(self, content: Mapping[str, Any]) -> ChatOptions:
        known = {name: value for name, value in content.items() if value is not None}
        for name, value in known.items():
            if name in NEUTRAL:
                if value not in NEUTRAL[name]:
                    raise _refused(f"{name}: only {json.dumps(NEUTRAL[name][0])} is taken here; leave it out")
            elif name not in OPTIONS and name not in KNOWN:
                raise _refused(f"{printable(name)[:60]}: is unknown here; leave it out")
        for name, kind in (("model", str), ("stream", bool), ("stream_options", dict), ("user", str)):
            if not fits(known.get(name), kind | None):
                raise _refused(f"{name}: is not of its type")
        if known.get("model", self.name) != self.name:
            raise HTTPException(404, f"model: there is no {known['model']!r:.60}; this service has {self.name!r}")
        if len({*map(str, (known[name] for name in ("max_tokens", "max_completion_tokens") if name in known))}) > 1:
            raise _refused("max_tokens and max_completion_tokens: differ; give one of them")
        values = {**self.defaults, **{OPTIONS[name]: value for name, value in known.items() if name in OPTIONS}}
        if any(name in known for name in DRAWS):
            values["sample"] = True
        values["stop"] = _stops(values.get("stop"))
        try:
            options = checked(ChatOptions, values, use="chat", client=True)
            self.predictor.check_options(options)
        except UserError as fault:
            raise _refused(str(fault)) from fault
        return replace(options, batch_size=self.reader.rows)

    def _conversation(self, content: Mapping[str, Any]) -> list[Said]:
        messages = content.get("messages")
        if not isinstance(messages, list) or not messages:
            raise _refused("messages: is no list of messages, or empty")
        if len(messages) > MOST_TURNS:
            raise _refused(f"messages: has {len(messages):,}; {MOST_TURNS:,} are the most")
        said = [self._said(message, f"message {place}") for place, message in enumerate(messages, start=1)]
        if said[-1].turn.role != "user":
            raise _refused("messages: the last one is not the user's, so that there is nothing to answer")
        if sum(len(one.turn.text) for one in said) > MAX_TEXT:
            raise HTTPException(413, f"messages: have more than {MAX_TEXT:,} characters")
        assert self.predictor.form is not None
        count, room = sum(one.turn.images for one in said), self.predictor.decoder.max_len
        if (least := count * self.predictor.form.states) >= room:
            raise _refused(full(least, room))
        return said

    def _said(self, message: Any, name: str) -> Said:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in ROLES:
            raise _refused(f"{name}: its role is not one of {', '.join(ROLES)}")
        if unknown := next((key for key in message if key not in ("role", "content", "name")), None):
            raise _refused(f"{name}: {printable(unknown)[:60]} is unknown here; leave it out")
        parts = message.get("content")
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        if not isinstance(parts, list):
            raise _refused(f"{name}: its content is neither a text nor a list of parts")
        texts, images = list[str](), list[Photo]()
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif kind == "image_url":
                images.append(Photo(_content(part.get("image_url"), name), name, self.reader.least))
            else:
                raise _refused(f"{name}: a part is neither a text nor an image_url")
        text = "\n".join(texts)
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise _refused(f"{name}: its text is not UTF-8")
        if images and ROLES[role] != "user":
            raise _refused(f"{name}: only the user shows images")
        return Said(Turn(ROLES[role], text, len(images)), images)


def _content(image: Any, name: str) -> bytes:
    """Returns the bytes of an image in a data URL."""
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str):
        raise _refused(f"{name}: its image_url has no url")
    head, comma, data = url.partition(",")
    if not head.lower().startswith("data:") or not comma:
        raise _refused(f"{name}: its image is no data URL; send data:image/jpeg;base64,... (no address is fetched)")
    try:
        if not head.lower().endswith(";base64"):
            raise ValueError
        return base64.b64decode(data, validate=True)
    except ValueError as fault:
        raise _refused(f"{name}: its image is not in base64") from fault


def _stops(stop: Any) -> list[str] | None:
    if stop is None:
        return None
    stops = [stop] if isinstance(stop, str) else stop
    whole = isinstance(stops, list) and len(stops) <= MOST_STOPS
    if not whole or not all(isinstance(one, str) and 0 < len(one) <= LONGEST_STOP for one in stops):
        raise _refused(f"stop: is not a text or up to {MOST_STOPS} of up to {LONGEST_STOP} characters")
    return stops


def _refused(line: str) -> HTTPException:
    return HTTPException(400, line)


def error(code: int, line: str) -> dict[str, Any]:
    """Returns the error object for a fault, in this format."""
    kind = "invalid_request_error" if code < 500 else "server_error"
    return {"error": {"message": printable(line), "type": kind, "param": None, "code": code}}


class Answer:
    """Builds an answer in this format.

    Args:
        name: The name of the model.
        prompt: The conversation.
    """

    def __init__(self, name: str, prompt: Prompt) -> None:
        self.about = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": name}
        self.read = len(prompt.tokens)

    def whole(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer as one object."""
        message = {"role": "assistant", "content": reply["text"]}
        choice = {"index": 0, "message": message, "finish_reason": _reason(reply), "logprobs": None}
        return {**self.about, "object": "chat.completion", "choices": [choice], "usage": self._usage(reply)}

    async def chunks(
        self,
        grown: asyncio.Queue[tuple[int, Texts] | None],
        results: Coroutine[Any, Any, Any],
        *,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        counted: bool,
    ) -> AsyncIterator[str]:
        """Yields the answer as events, each with the new part of its text; arguments as in `events`."""
        written = ""
        try:
            yield self._chunk({"role": "assistant", "content": ""})
            async with aclosing(growth(grown, results)) as steps:
                async for step in steps:
                    if isinstance(step, tuple):
                        text, ended = spoken(decode, step[1][0], stops)
                        text = text if ended else shown(text, stops)
                    else:
                        reply = step["results"][0]
                        text = reply["text"]
                    if len(text) > len(written):
                        yield self._chunk({"content": text[len(written) :]})
                        written = text
            yield self._chunk({}, _reason(reply))
            if counted:
                yield _event({**self.about, "object": _CHUNK, "choices": [], "usage": self._usage(reply)})
        except (UserError, HTTPException) as fault:
            code, line = (fault.status_code, fault.detail) if isinstance(fault, HTTPException) else (400, str(fault))
            yield _event(error(code, line))
        except Exception as fault:
            logging.getLogger("uvicorn.error").error("%s", FAILED, exc_info=fault)
            yield _event(error(500, FAILED))
        yield "data: [DONE]\n\n"

    def _chunk(self, delta: Mapping[str, Any], reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return _event({**self.about, "object": _CHUNK, "choices": [choice]})

    def _usage(self, reply: Mapping[str, Any]) -> dict[str, int]:
        written = len(reply["tokens"])
        return {"prompt_tokens": self.read, "completion_tokens": written, "total_tokens": self.read + written}


_CHUNK = "chat.completion.chunk"


def _reason(reply: Mapping[str, Any]) -> str:
    return "stop" if reply["ended"] else "length"


def _event(content: Any) -> str:
    return f"data: {json.dumps(content)}\n\n"
