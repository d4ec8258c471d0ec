"""Conversations over HTTP, in the format of POST /v1/chat/completions that many clients support."""

import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypedDict, cast
from uuid import uuid4

from starlette.exceptions import HTTPException

from vlm.config.tree import Value
from vlm.config.types import describe_json_mismatch, fits
from vlm.data.text.conversation import Role, Turn
from vlm.errors import UserError, printable
from vlm.inference.command_options import ChatOptions
from vlm.inference.options import build_options
from vlm.serving.engine import Results, Updates, describe_failure, stream_updates
from vlm.serving.reader import BLANKS, MAX_TEXT, RequestImage, RequestReader, decode_data_url, iter_images, parse_json
from vlm.tasks.chat.predictor import (
    ChatPredictor,
    Prompt,
    TurnWithImages,
    cut_at_stop,
    format_context_full,
    visible_text,
)
from vlm.untrusted.sizes import JsonValue

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
# Fields that are read separately, with their types.
TYPES = {"model": str, "messages": Any, "stream": bool, "stream_options": dict}
# Values of sampling options that exclude no token. Other values turn sampling on.
KEEPS_ALL: Mapping[str, tuple[JsonValue, ...]] = {"temperature": (), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
# Fields that do not change an answer, with their types: user and request labels, cache hints.
LABELS = {
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
# Fields that are not supported, with the values that are accepted because they have no effect, like null and [].
NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
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
STREAM_NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = {
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
}
DETAILS = ("auto", "low", "high", "original")  # of an image; the model's own preprocessing decides
CACHE_HINTS = ("prompt_cache_breakpoint", "cache_control")  # of a part


def bad_request(line: str) -> HTTPException:
    """Returns the error for an invalid request."""
    return HTTPException(400, line)


def read_fields(content: Mapping[str, Value], *, supports_thinking: bool) -> dict[str, JsonValue]:
    """Returns the fields of a request that set an option, as sent.

    Args:
        content: The request without nulls.
        supports_thinking: Whether the model's chat template can turn thinking on and off.
    Raises:
        HTTPException: A field is unknown, of another type, or has a value that is not supported.
    """
    neutral_values = NEUTRAL if supports_thinking else {**NEUTRAL, "reasoning_effort": ("none",)}
    for name, value in content.items():
        kind = LABELS.get(name, TYPES.get(name))
        if kind is not None and not fits(value, kind):
            raise bad_request(f"{name}: {describe_json_mismatch(value, kind)}")
        if name == "chat_template_kwargs":
            _check_part(f"{name}.", value, {"enable_thinking": (True,) if supports_thinking else (True, False)})
        elif kind is None and name not in OPTIONS:
            _check_neutral(name, value, neutral_values)
    stream_neutral = {"include_usage": (True, False), **STREAM_NEUTRAL}
    _check_part("stream_options.", content.get("stream_options", {}), stream_neutral)
    options: dict[str, JsonValue] = {name: value for name, value in content.items() if name in OPTIONS}
    if "stop" in options:
        options["stop"] = _read_stop_strings(options["stop"])
    if len({*map(str, (options[name] for name in ("max_tokens", "max_completion_tokens") if name in options))}) > 1:
        raise bad_request("max_tokens and max_completion_tokens: have different values; give one of them")
    return options


def _check_part(prefix: str, fields: Value, neutral: Mapping[str, tuple[JsonValue, ...]]) -> None:
    if not isinstance(fields, dict):
        raise bad_request(f"{prefix[:-1]}: {describe_json_mismatch(fields, dict)}")
    for name, value in fields.items():
        _check_neutral(name, value, neutral, prefix=prefix)


def _check_neutral(
    name: str, value: JsonValue, neutral: Mapping[str, tuple[JsonValue, ...]], *, prefix: str = ""
) -> None:
    """Rejects a field that is not supported unless its value has no effect."""
    if value == []:
        return
    allowed = neutral.get(name)
    if allowed is None:
        raise bad_request(f"{prefix}{printable(name)[:60]}: not supported; remove it")
    if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
        values = f"{' and '.join(map(json.dumps, allowed))} {'is' if len(allowed) == 1 else 'are'}"
        raise bad_request(f"{prefix}{name}: only {values} supported; remove the field")


def _read_stop_strings(stop: JsonValue) -> list[str]:
    """Returns the stop strings of a request; empty strings are ignored."""
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and len(text) <= MAX_STOP_LENGTH for text in stops):
        limits = f"up to {MAX_STOPS}, each of up to {MAX_STOP_LENGTH} characters"
        raise bad_request(f"stop: must be a string, or a list of {limits}")
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop: has {len(stops):,} strings; the maximum is {MAX_STOPS}")
    return [text for text in stops if text]


def check_keys(fields: Mapping[str, JsonValue], allowed: Sequence[str], name: str) -> None:
    """Rejects a key of a message or of a part that is not supported, unless it is empty.

    Clients send earlier answers back with all keys of their message type, such as `refusal`, `tool_calls` and `audio`.
    """
    for key, value in fields.items():
        if key not in allowed and value not in ("", [], {}):
            raise bad_request(f"{name}: {printable(key)[:60]} is not supported; remove it")


MAX_TURNS = 1024
SEEDS = 2**62  # a request without a seed gets a random one below this
ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ChatRequest(NamedTuple):
    """A request.

    Args:
        prompt: The conversation, encoded for the model.
        options: Options of the answer.
        stream: Whether the answer is streamed.
        include_usage: Whether the stream ends with the numbers of tokens.
    """

    prompt: Prompt
    options: ChatOptions
    stream: bool
    include_usage: bool


class ChatReader:
    """Reads conversations from requests.

    Args:
        predictor: The model.
        reader: The reader of /predict, which has the limits.
        name: The name of the model.
    """

    def __init__(self, predictor: ChatPredictor, reader: RequestReader, name: str) -> None:
        self.predictor, self.reader, self.name = predictor, reader, name
        chat_options = ChatOptions.__dataclass_fields__
        self.defaults = {name: value for name, value in reader.defaults.items() if name in chat_options}

    async def read(self, body: bytearray, *, deadline: float) -> ChatRequest:
        """Reads a request from a body.

        Args:
            body: It is empty afterwards.
            deadline: Time at which the request stops waiting for the budget, by the event loop's clock.
        Raises:
            HTTPException: The body is invalid, or the budget is not available in time.
            UserError: The model cannot read the content.
        """
        size, run = len(body), self.reader.run_in_budget
        try:  # null is the same as no field, at every level
            content = await run(
                deadline,
                size,
                parse_json,
                body,
                object_hook=lambda fields: {name: value for name, value in fields.items() if value is not None},
            )
        except (ValueError, RecursionError) as fault:
            raise bad_request("the body is not JSON") from fault
        body.clear()
        if not isinstance(content, dict):
            raise bad_request("the body is not a JSON object")
        options = self._read_options(content)
        source = await run(deadline, size, self._read_messages, content)
        cost = sum(photo.cost for turn in source for photo in iter_images(list(turn.images)))
        prompt = await run(deadline, cost, self.predictor.prepare, source, options)
        include_usage = bool(content.get("stream_options", {}).get("include_usage"))
        options = replace(options, seed=0)  # the prompt has the seed; conversations with equal options share a batch
        return ChatRequest(prompt, options, bool(content.get("stream")), include_usage)

    def check_model(self, name: JsonValue) -> None:
        """Rejects the name of another model."""
        if name != self.name:
            raise HTTPException(404, f"model: {name!r:.60} does not exist; this service has {self.name!r}")

    def _read_options(self, content: Mapping[str, Value]) -> ChatOptions:
        assert self.predictor.form is not None
        fields = read_fields(content, supports_thinking=self.predictor.form.has_thoughts)
        self.check_model(content.get("model", self.name))
        values = {"seed": secrets.randbelow(SEEDS), **self.defaults}  # without --seed, answers differ
        values |= {OPTIONS[name]: value for name, value in fields.items()}
        if any(name in fields and fields[name] not in keeps_all for name, keeps_all in KEEPS_ALL.items()):
            values["sample"] = True
        elif values.get("sample") is False:
            values = {name: value for name, value in values.items() if name not in KEEPS_ALL}
        try:
            options = build_options(ChatOptions, values, use="chat", client=True)
            self.predictor.check_options(options)
        except UserError as fault:
            raise bad_request(str(fault)) from fault
        return replace(options, batch_size=self.reader.rows)

    def _read_messages(self, content: Mapping[str, JsonValue]) -> list[TurnWithImages]:
        messages = content.get("messages")
        if not isinstance(messages, list) or not messages:
            raise bad_request("messages: must be a list of at least one message")
        if len(messages) > MAX_TURNS:
            raise bad_request(f"messages: has {len(messages):,} messages; the maximum is {MAX_TURNS:,}")
        turns = [self._read_message(message, f"message {place}") for place, message in enumerate(messages, start=1)]
        if turns[-1].turn.role != "user":
            raise bad_request('messages: the last message must have role "user"')
        if sum(len(turn.turn.text) for turn in turns) > MAX_TEXT:
            raise HTTPException(413, f"messages: have more than {MAX_TEXT:,} characters")
        assert self.predictor.form is not None
        count, room = sum(turn.turn.num_images for turn in turns), self.predictor.decoder.max_len
        if (least := count * self.predictor.form.states) >= room:
            raise bad_request(format_context_full(least, room))
        return turns

    def _read_message(self, message: JsonValue, name: str) -> TurnWithImages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(role, str) or role not in ROLES:
            raise bad_request(f"{name}: role is {printable(str(role))[:60]}, not one of {', '.join(ROLES)}")
        check_keys(message, ("role", "content", "name"), name)
        parts = message.get("content", "" if role == "assistant" else None)
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        if not isinstance(parts, list):
            raise bad_request(f"{name}: content must be a string or a list of parts")
        text, images, places = "", list[RequestImage](), list[int]()
        follows_text = False
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(part, dict) or kind not in ("text", "image_url"):
                name_of_kind = printable(str(kind))[:60]
                raise bad_request(f"{name}: the type of a part must be text or image_url, not {name_of_kind}")
            check_keys(part, ("type", kind, *CACHE_HINTS), f"{name}: a part")
            if kind == "image_url":
                images.append(RequestImage(_decode_image(part.get("image_url"), name), name, self.reader.min_side))
                places.append(len(text))
            elif isinstance(part.get("text"), str):
                text += f"\n{part['text']}" if follows_text else part["text"]
            else:
                raise bad_request(f"{name}: a part of type text has no text")
            follows_text = kind == "text"
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise bad_request(f"{name}: the text is not UTF-8")
        if images and ROLES[role] != "user":
            raise bad_request(f"{name}: only user messages can contain images")
        return TurnWithImages(Turn(ROLES[role], text, tuple(places)), images)


def _decode_image(image: JsonValue, name: str) -> bytes:
    """Returns the bytes of an image in a data URL."""
    fields = {"url": image} if isinstance(image, str) else image
    url = fields.get("url") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(url, str):
        raise bad_request(f"{name}: image_url has no url")
    check_keys(fields, ("url", "detail"), f"{name}: image_url")
    if fields.get("detail", "auto") not in DETAILS:
        raise bad_request(f"{name}: image_url: detail is not one of {', '.join(DETAILS)}")
    head, comma, _ = url.strip(BLANKS).partition(",")
    if not head.lower().startswith("data:") or not comma:
        remedy = "send data:image/jpeg;base64,... (URLs are not fetched)"
        raise bad_request(f"{name}: the image is not a data URL; {remedy}")
    try:
        return decode_data_url(url)
    except ValueError as fault:
        raise bad_request(f"{name}: the image is not valid base64") from fault


def format_error(code: int, line: str) -> dict[str, JsonValue]:
    """Returns an error object of the chat completions format."""
    kind = "invalid_request_error" if code < 500 else "server_error"
    return {"error": {"message": printable(line), "type": kind, "param": None, "code": code}}


CHUNK = "chat.completion.chunk"


class ReplyFields(TypedDict):
    """The fields of a `Reply` in a response."""

    text: str
    tokens: list[int]
    ended: bool


class CompletionFormatter:
    """Formats the answer to a conversation as a chat completion, or as a stream of chunks.

    Args:
        name: The name of the model.
        prompt: The conversation.
    """

    def __init__(self, name: str, prompt: Prompt) -> None:
        self.common_fields: dict[str, JsonValue] = {
            "id": f"chatcmpl-{uuid4().hex}",
            "created": int(time.time()),
            "model": name,
        }
        self.prompt_tokens = len(prompt.tokens)

    def format_completion(self, reply: ReplyFields) -> dict[str, JsonValue]:
        """Returns the answer as a chat.completion object."""
        choice: dict[str, JsonValue] = {"index": 0, "message": {"role": "assistant", "content": reply["text"]}}
        choice |= {"finish_reason": _finish_reason(reply), "logprobs": None}
        about: dict[str, JsonValue] = {
            "object": "chat.completion",
            "choices": [choice],
            "usage": self._token_usage(reply),
        }
        return {**self.common_fields, **about}

    async def stream_chunks(
        self,
        updates: Updates,
        results: Awaitable[Results],
        *,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        include_usage: bool,
    ) -> AsyncIterator[str]:
        """Yields the answer as events, each with the new part of the text; arguments as in `stream_events`."""
        sent = ""
        try:
            yield self._format_chunk({"role": "assistant", "content": ""}, include_usage=include_usage)
            async with aclosing(stream_updates(updates, results)) as steps:
                async for step in steps:
                    if isinstance(step, tuple):
                        text, ended = cut_at_stop(decode, step[1][0], stops)
                        text = text if ended else visible_text(text, stops)
                    else:
                        reply = cast(ReplyFields, step["results"][0])
                        text = reply["text"]
                    if len(text) > len(sent):
                        yield self._format_chunk({"content": text[len(sent) :]}, include_usage=include_usage)
                        sent = text
            yield self._format_chunk({}, include_usage=include_usage, reason=_finish_reason(reply))
            if include_usage:
                about: dict[str, JsonValue] = {"object": CHUNK, "choices": [], "usage": self._token_usage(reply)}
                yield _format_event({**self.common_fields, **about})
        except Exception as fault:
            yield _format_event(format_error(*describe_failure(fault)))
        yield "data: [DONE]\n\n"

    def _format_chunk(self, delta: Mapping[str, str], *, include_usage: bool, reason: str | None = None) -> str:
        choice: dict[str, JsonValue] = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        usage: dict[str, JsonValue] = {"usage": None} if include_usage else {}
        return _format_event({**self.common_fields, "object": CHUNK, "choices": [choice], **usage})

    def _token_usage(self, reply: ReplyFields) -> dict[str, int]:
        completion_tokens = len(reply["tokens"])
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }


def _finish_reason(reply: ReplyFields) -> str:
    return "stop" if reply["ended"] else "length"


def _format_event(content: Mapping[str, JsonValue]) -> str:
    return f"data: {json.dumps(content)}\n\n"
