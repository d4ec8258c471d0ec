"""Conversations over HTTP, in the format of POST /v1/chat/completions that many clients support."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from starlette.exceptions import HTTPException

from vlm.config.tree import Value
from vlm.data.text.conversation import Role, Turn
from vlm.errors import Range, printable
from vlm.inference.command_options import ChatOptions
from vlm.serving import generation
from vlm.serving.fields import (
    EXTENSIONS_NEUTRAL,
    LABELS,
    FieldTable,
    Neutral,
    bad_request,
    check_fields,
    check_keys,
    check_model,
    read_object,
)
from vlm.serving.generation import MAX_TOP, OptionReader, TextRequest
from vlm.serving.reader import BLANKS, MAX_TEXT, RequestImage, RequestReader, decode_data_url, iter_images
from vlm.tasks.chat.predictor import ChatPredictor, TurnWithImages, format_context_full
from vlm.untrusted.sizes import JsonValue

OPTIONS = {**generation.OPTIONS, "max_completion_tokens": "max_tokens"}
# What to use instead of tools.
CALLS = "describe the functions in a message, and send the schema of a call as response_format"
FIELDS = FieldTable(
    options=OPTIONS,
    types={
        **generation.TYPES,
        "messages": Any,
        "chat_template_kwargs": dict,
        "logprobs": bool,
        "top_logprobs": Annotated[int, Range(0, MAX_TOP)],
    },
    labels={**LABELS, "parallel_tool_calls": bool},  # no tools are supported
    neutral={
        "store": (False,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "verbosity": ("medium",),
        **EXTENSIONS_NEUTRAL,
        "add_generation_prompt": (True,),
        "add_special_tokens": (False,),
        "continue_final_message": (False,),
        "echo": (False,),
        "mm_processor_kwargs": ({},),
    },
    remedies={
        "tools": CALLS,
        "functions": CALLS,
    },
)
message_error = partial(bad_request, param="messages")
DETAILS = ("auto", "low", "high", "original")  # of an image; the model's own preprocessing decides
CACHE_HINTS = ("prompt_cache_breakpoint", "cache_control")  # of a part


def check_request_fields(content: Mapping[str, Value], *, supports_thinking: bool) -> None:
    """Checks the fields of a request, except the values of options and the messages.

    Args:
        content: The request without nulls.
        supports_thinking: Whether the model's chat template can turn thinking on and off.
    Raises:
        HTTPException: A field is unknown, of another type, or has a value that is not supported.
    """
    table = FIELDS
    if not supports_thinking:
        table = replace(FIELDS, neutral={**FIELDS.neutral, "reasoning_effort": ("none",)})
    table.check(content)
    thinking: Neutral = {"enable_thinking": (True,) if supports_thinking else (True, False)}
    check_fields("chat_template_kwargs", content.get("chat_template_kwargs", {}), thinking)
    if len({str(content[name]) for name in ("max_tokens", "max_completion_tokens") if name in content}) > 1:
        line = "max_tokens and max_completion_tokens: have different values; give one of them"
        raise bad_request(line, param="max_completion_tokens")
    if content.get("top_logprobs") and not content.get("logprobs"):
        raise bad_request('top_logprobs: needs "logprobs": true', param="top_logprobs")


MAX_TURNS = 1024
ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class ChatReader:
    """Reads conversations from requests.

    Args:
        predictor: The model.
        reader: The reader of /predict, which has the limits.
        name: The name of the model.
        max_prompts: Maximum number of choices of a request.
    """

    def __init__(self, predictor: ChatPredictor, reader: RequestReader, name: str, *, max_prompts: int) -> None:
        self.predictor, self.reader, self.name = predictor, reader, name
        self.options = OptionReader(predictor, reader, max_prompts=max_prompts)

    async def read(self, body: bytearray, *, deadline: float) -> TextRequest:
        """Reads a request from a body.

        Args:
            body: It is empty afterwards.
            deadline: Time at which the request stops waiting for the budget, by the event loop's clock.
        Raises:
            HTTPException: The body is invalid, or the budget is not available in time.
            UserError: The model cannot read the content.
        """
        size, run = len(body), self.reader.run_in_budget
        content = await read_object(self.reader, body, deadline=deadline)
        assert self.predictor.form is not None
        check_request_fields(content, supports_thinking=self.predictor.form.has_thoughts)
        check_model(content.get("model", self.name), self.name)
        logprobs = content.get("top_logprobs", 0) if content.get("logprobs") else None
        options = await run(deadline, size, self.options.read, ChatOptions, content, OPTIONS, {"logprobs": logprobs})
        choices = content.get("n", 1)
        self.options.check_count(1, choices)
        source = await run(deadline, size, self._read_messages, content)
        cost = sum(photo.cost for turn in source for photo in iter_images(list(turn.images)))
        prompt = await run(deadline, cost, self.predictor.prepare, source, options)
        return TextRequest(
            prompts=self.options.make_choices([prompt], choices, options),
            options=options.without_prompt_parts(),
            seed=options.seed,
            stream=bool(content.get("stream")),
            include_usage=bool(content.get("stream_options", {}).get("include_usage")),
        )

    def _read_messages(self, content: Mapping[str, JsonValue]) -> list[TurnWithImages]:
        messages = content.get("messages")
        if not isinstance(messages, list) or not messages:
            raise message_error("messages: must be a list of at least one message")
        if len(messages) > MAX_TURNS:
            raise message_error(f"messages: has {len(messages):,} messages; the maximum is {MAX_TURNS:,}")
        turns = [self._read_message(message, f"message {place}") for place, message in enumerate(messages, start=1)]
        if turns[-1].turn.role != "user":
            raise message_error('messages: the last message must have role "user"')
        if sum(len(turn.turn.text) for turn in turns) > MAX_TEXT:
            raise HTTPException(413, f"messages: have more than {MAX_TEXT:,} characters")
        assert self.predictor.form is not None
        count, room = sum(turn.turn.num_images for turn in turns), self.predictor.decoder.max_len
        if (least := count * self.predictor.form.states) >= room:
            raise message_error(format_context_full(least, room), code="context_length_exceeded")
        return turns

    def _read_message(self, message: JsonValue, name: str) -> TurnWithImages:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(role, str) or role not in ROLES:
            raise message_error(f"{name}: role is {printable(str(role))[:60]}, not one of {', '.join(ROLES)}")
        check_keys(message, ("role", "content", "name"), name)
        parts = message.get("content", "" if role == "assistant" else None)
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        if not isinstance(parts, list):
            raise message_error(f"{name}: content must be a string or a list of parts")
        text, images, places = "", list[RequestImage](), list[int]()
        follows_text = False
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(part, dict) or kind not in ("text", "image_url"):
                name_of_kind = printable(str(kind))[:60]
                raise message_error(f"{name}: the type of a part must be text or image_url, not {name_of_kind}")
            check_keys(part, ("type", kind, *CACHE_HINTS), f"{name}: a part")
            if kind == "image_url":
                images.append(RequestImage(_decode_image(part.get("image_url"), name), name, self.reader.min_side))
                places.append(len(text))
            elif isinstance(part.get("text"), str):
                text += f"\n{part['text']}" if follows_text else part["text"]
            else:
                raise message_error(f"{name}: a part of type text has no text")
            follows_text = kind == "text"
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise message_error(f"{name}: the text is not UTF-8")
        if images and ROLES[role] != "user":
            raise message_error(f"{name}: only user messages can contain images")
        return TurnWithImages(Turn(ROLES[role], text, tuple(places)), images)


def _decode_image(image: JsonValue, name: str) -> bytes:
    """Returns the bytes of an image in a data URL."""
    fields = {"url": image} if isinstance(image, str) else image
    url = fields.get("url") if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(url, str):
        raise message_error(f"{name}: image_url has no url")
    check_keys(fields, ("url", "detail"), f"{name}: image_url")
    if fields.get("detail", "auto") not in DETAILS:
        raise message_error(f"{name}: image_url: detail is not one of {', '.join(DETAILS)}")
    head, comma, _ = url.strip(BLANKS).partition(",")
    if not head.lower().startswith("data:") or not comma:
        remedy = "send data:image/jpeg;base64,... (URLs are not fetched)"
        raise message_error(f"{name}: the image is not a data URL; {remedy}")
    try:
        return decode_data_url(url)
    except ValueError as fault:
        raise message_error(f"{name}: the image is not valid base64") from fault
