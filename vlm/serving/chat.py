"""Conversations over HTTP, in the format of POST /v1/chat/completions that many clients support."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple
from uuid import uuid4

from starlette.exceptions import HTTPException

from vlm.config.types import describe_json_mismatch, fits
from vlm.data.text.conversation import Role, Turn
from vlm.errors import UserError, printable
from vlm.inference.command_options import ChatOptions
from vlm.inference.options import checked
from vlm.serving.engine import FAILED, Texts, growth
from vlm.serving.reader import BLANKS, MAX_TEXT, Photo, Reader, as_json, decode_data_url, photos
from vlm.tasks.chat.predictor import ChatPredictor, Prompt, Said, full, shown, spoken

MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
# Fields of a request that set an option of vlm.
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
# Fields that are read for themselves, with their types.
TYPES: Mapping[str, Any] = {"model": str, "messages": Any, "stream": bool, "stream_options": dict}
# Values of options that keep all tokens, so that they do not decide between sampling and the likeliest token.
KEEPS_ALL: Mapping[str, tuple[Any, ...]] = {"temperature": (), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
# Fields that never change an answer, with their types: labels of users and requests, hints about caches.
LABELS: Mapping[str, Any] = {
    "user": str,
    "metadata": dict[str, str],
    "prompt_cache_key": str,
    "prompt_cache_options": dict[str, str],
    "prompt_cache_retention": Literal["in_memory", "in-memory", "24h"],
    "safety_identifier": str,
    "parallel_tool_calls": bool,  # no tools are supported
    "request_id": str,  # vLLM
    "keep_alive": str | float,  # Ollama
    "cache_prompt": bool,  # llama.cpp
}
# Fields that are not supported, with the values that change nothing; null and empty lists never do.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    # Of other services: vLLM, llama.cpp, Ollama.
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "n_probs": (0,),
    "options": ({},),
    "priority": (0,),
    "repeat_penalty": (1,),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
STREAM_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
DETAILS = ("auto", "low", "high", "original")  # of an image; the model's own preprocessing decides
CACHE_HINTS = ("prompt_cache_breakpoint", "cache_control")  # of a part


def refused(line: str) -> HTTPException:
    """Returns the refusal of a request that is not valid."""
    return HTTPException(400, line)


def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not null, for `json.loads`: null is the same as no field, at every level."""
    return {name: value for name, value in fields.items() if value is not None}


def read_fields(content: Mapping[str, Any], *, thinks: bool) -> dict[str, Any]:
    """Returns the fields of a request that set an option, as sent.

    Args:
        content: The request without nulls.
        thinks: Whether the model's chat template has a switch for thoughts.
    Raises:
        HTTPException: A field is unknown, of another type, or has a value that is not supported.
    """
    neutral_values = NEUTRAL if thinks else {**NEUTRAL, "reasoning_effort": ("none",)}
    for name, value in content.items():
        kind = LABELS.get(name, TYPES.get(name))
        if kind is not None and not fits(value, kind):
            raise refused(f"{name}: {describe_json_mismatch(value, kind)}")
        if name == "chat_template_kwargs":
            neutral: Mapping[str, tuple[Any, ...]] = {"enable_thinking": (True,) if thinks else (True, False)}
            _check_part(f"{name}.", value, neutral)
        elif kind is None and name not in OPTIONS:
            _check_neutral(name, value, neutral_values)
    _check_part(
        "stream_options.", content.get("stream_options", {}), {"include_usage": (True, False), **STREAM_NEUTRAL}
    )
    options = {name: value for name, value in content.items() if name in OPTIONS}
    if "stop" in options:
        options["stop"] = _stops(options["stop"])
    if len({*map(str, (options[name] for name in ("max_tokens", "max_completion_tokens") if name in options))}) > 1:
        raise refused("max_tokens and max_completion_tokens: differ; give one of them")
    return options


def _check_part(prefix: str, fields: Any, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    if not isinstance(fields, dict):
        raise refused(f"{prefix[:-1]}: {describe_json_mismatch(fields, dict)}")
    for name, value in fields.items():
        _check_neutral(name, value, neutral, prefix=prefix)


def _check_neutral(name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]], *, prefix: str = "") -> None:
    """Refuses a field that is not supported unless its value changes nothing."""
    if value == []:
        return
    known = neutral.get(name)
    if known is None:
        raise refused(f"{prefix}{printable(name)[:60]}: is unknown here; leave it out")
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known):
        values = " and ".join(map(json.dumps, known))
        raise refused(f"{prefix}{name}: only {values} {'is' if len(known) == 1 else 'are'} supported; leave it out")


def _stops(stop: Any) -> list[str]:
    """Returns the stop texts of a request; an empty one stops nothing."""
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and len(one) <= MAX_STOP_LENGTH for one in stops):
        raise refused(f"stop: is not a text or up to {MAX_STOPS} of up to {MAX_STOP_LENGTH} characters")
    if len(stops) > MAX_STOPS:
        raise refused(f"stop: has {len(stops):,} texts; {MAX_STOPS} are the most")
    return [one for one in stops if one]


def check_keys(fields: Mapping[str, Any], known: Sequence[str], name: str) -> None:
    """Refuses a key of a message or of a part that is not supported, unless it is empty.

    Clients store answers with all keys of their own type, such as `refusal`, `tool_calls` and `audio`.
    """
    for key, value in fields.items():
        if key not in known and value not in ("", [], {}):
            raise refused(f"{name}: {printable(key)[:60]} is unknown here; leave it out")


MOST_TURNS = 1024
SEEDS = 2**62  # number of seeds that a request without one draws from
ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ChatRequest(NamedTuple):
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

    async def read(self, body: bytearray, *, deadline: float) -> ChatRequest:
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
            content = await self.reader.work(size, partial(as_json, body, object_hook=without_nulls), deadline=deadline)
        except (ValueError, RecursionError) as fault:
            raise refused("the body is not JSON") from fault
        body.clear()
        if not isinstance(content, dict):
            raise refused("the body is no JSON object")
        options = self._options(content)
        source = await self.reader.work(size, self._conversation, content, deadline=deadline)
        cost = sum(photo.cost for said in source for photo in photos(list(said.images)))
        prompt = await self.reader.work(cost, self.predictor.prepare, source, options, deadline=deadline)
        wanted = content.get("stream_options", {})
        options = replace(options, seed=0)  # the prompt has it; conversations with equal options share a batch
        return ChatRequest(prompt, options, bool(content.get("stream")), bool(wanted.get("include_usage")))

    def check_model(self, name: str) -> None:
        """Refuses the name of another model."""
        if name != self.name:
            raise HTTPException(404, f"model: there is no {name!r:.60}; this service has {self.name!r}")

    def _options(self, content: Mapping[str, Any]) -> ChatOptions:
        assert self.predictor.form is not None and self.predictor.form.chat is not None
        fields = read_fields(content, thinks=any(self.predictor.form.chat.thoughts))
        self.check_model(content.get("model", self.name))
        values = {"seed": secrets.randbelow(SEEDS), **self.defaults}  # without --seed, answers differ
        values |= {OPTIONS[name]: value for name, value in fields.items()}
        if any(name in fields and fields[name] not in keeps_all for name, keeps_all in KEEPS_ALL.items()):
            values["sample"] = True
        elif values.get("sample") is False:
            values = {name: value for name, value in values.items() if name not in KEEPS_ALL}
        try:
            options = checked(ChatOptions, values, use="chat", client=True)
            self.predictor.check_options(options)
        except UserError as fault:
            raise refused(str(fault)) from fault
        return replace(options, batch_size=self.reader.rows)

    def _conversation(self, content: Mapping[str, Any]) -> list[Said]:
        messages = content.get("messages")
        if not isinstance(messages, list) or not messages:
            raise refused("messages: is no list of messages, or empty")
        if len(messages) > MOST_TURNS:
            raise refused(f"messages: has {len(messages):,}; {MOST_TURNS:,} are the most")
        said = [self._said(message, f"message {place}") for place, message in enumerate(messages, start=1)]
        if said[-1].turn.role != "user":
            raise refused("messages: the last one is not the user's, so that there is nothing to answer")
        if sum(len(one.turn.text) for one in said) > MAX_TEXT:
            raise HTTPException(413, f"messages: have more than {MAX_TEXT:,} characters")
        assert self.predictor.form is not None
        count, room = sum(one.turn.images for one in said), self.predictor.decoder.max_len
        if (least := count * self.predictor.form.states) >= room:
            raise refused(full(least, room))
        return said

    def _said(self, message: Any, name: str) -> Said:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in ROLES:
            raise refused(f"{name}: its role is {printable(str(role))[:60]}, not one of {', '.join(ROLES)}")
        check_keys(message, ("role", "content", "name"), name)
        parts = message.get("content", "" if role == "assistant" else None)
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        if not isinstance(parts, list):
            raise refused(f"{name}: its content is neither a text nor a list of parts")
        texts, images = list[str](), list[Photo]()
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in ("text", "image_url"):
                raise refused(f"{name}: a part is neither a text nor an image_url, but {printable(str(kind))[:60]}")
            check_keys(part, ("type", kind, *CACHE_HINTS), f"{name}: a part")
            if kind == "image_url":
                images.append(Photo(_content(part.get("image_url"), name), name, self.reader.least))
            elif isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                raise refused(f"{name}: a part of type text has no text")
        text = "\n".join(texts)
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise refused(f"{name}: its text is not UTF-8")
        if images and ROLES[role] != "user":
            raise refused(f"{name}: only the user shows images")
        return Said(Turn(ROLES[role], text, len(images)), images)


def _content(image: Any, name: str) -> bytes:
    """Returns the bytes of an image in a data URL."""
    fields = {"url": image} if isinstance(image, str) else image
    url = fields.get("url") if isinstance(fields, dict) else None
    if not isinstance(url, str):
        raise refused(f"{name}: its image_url has no url")
    check_keys(fields, ("url", "detail"), f"{name}: image_url")
    if fields.get("detail", "auto") not in DETAILS:
        raise refused(f"{name}: image_url: detail is not one of {', '.join(DETAILS)}")
    head, comma, _ = url.strip(BLANKS).partition(",")
    if not head.lower().startswith("data:") or not comma:
        raise refused(f"{name}: its image is no data URL; send data:image/jpeg;base64,... (no address is fetched)")
    try:
        return decode_data_url(url)
    except ValueError as fault:
        raise refused(f"{name}: its image is not in base64") from fault


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
            yield self._chunk({"role": "assistant", "content": ""}, counted=counted)
            async with aclosing(growth(grown, results)) as steps:
                async for step in steps:
                    if isinstance(step, tuple):
                        text, ended = spoken(decode, step[1][0], stops)
                        text = text if ended else shown(text, stops)
                    else:
                        reply = step["results"][0]
                        text = reply["text"]
                    if len(text) > len(written):
                        yield self._chunk({"content": text[len(written) :]}, counted=counted)
                        written = text
            yield self._chunk({}, counted=counted, reason=_reason(reply))
            if counted:
                yield _event({**self.about, "object": _CHUNK, "choices": [], "usage": self._usage(reply)})
        except (UserError, HTTPException) as fault:
            code, line = (fault.status_code, fault.detail) if isinstance(fault, HTTPException) else (400, str(fault))
            yield _event(error(code, line))
        except Exception as fault:
            logging.getLogger("uvicorn.error").error("%s", FAILED, exc_info=fault)
            yield _event(error(500, FAILED))
        yield "data: [DONE]\n\n"

    def _chunk(self, delta: Mapping[str, Any], *, counted: bool, reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        return _event({**self.about, "object": _CHUNK, "choices": [choice], **({"usage": None} if counted else {})})

    def _usage(self, reply: Mapping[str, Any]) -> dict[str, int]:
        written = len(reply["tokens"])
        return {"prompt_tokens": self.read, "completion_tokens": written, "total_tokens": self.read + written}


_CHUNK = "chat.completion.chunk"


def _reason(reply: Mapping[str, Any]) -> str:
    return "stop" if reply["ended"] else "length"


def _event(content: Any) -> str:
    return f"data: {json.dumps(content)}\n\n"
