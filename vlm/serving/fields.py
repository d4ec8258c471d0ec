"""The fields of a JSON request in OpenAI's format: each is used, has no effect, or is refused by name."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.exceptions import HTTPException

from vlm.config.tree import Value
from vlm.config.types import describe_json_mismatch, fits
from vlm.errors import UserError, printable
from vlm.serving.reader import RequestReader, parse_json
from vlm.untrusted.sizes import JsonValue

MAX_STOPS = 16
MAX_STOP_LENGTH = 256  # characters
# Codes of errors without a code of their own, by HTTP status.
CODES = {
    400: "invalid_value",
    401: "invalid_api_key",
    403: "origin_not_allowed",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "request_too_large",
    421: "unknown_host",
    499: "client_disconnected",
    500: "model_failed",
    503: "overloaded",
}


class RequestError(HTTPException):
    """An error that names a field of the request.

    Args:
        status: The HTTP status.
        line: The message.
        param: The name of the field, if any.
        code: A machine-readable reason; by default that of the status.
    """

    def __init__(self, status: int, line: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, line)
        self.param, self.code = param, code


def bad_request(line: str, *, param: str | None = None, code: str | None = None) -> RequestError:
    """Returns the error for an invalid request; arguments as in `RequestError`."""
    return RequestError(400, line, param=param, code=code)


def format_error(status: int, line: str, *, param: str | None = None, code: str | None = None) -> dict[str, JsonValue]:
    """Returns an error object of OpenAI's format; arguments as in `RequestError`."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = CODES.get(status) if code is None else code
    return {"error": {"message": printable(line), "type": kind, "param": param, "code": code}}


def describe_option_error(fault: UserError, options: Mapping[str, str], sent: Mapping[str, JsonValue]) -> RequestError:
    """Returns the error for an option that the model refuses.

    Args:
        options: Names of options by the fields that set them.
        sent: The fields of the request.
    """
    line = str(fault)
    found = re.match(r"(?:--)?([\w-]+):? ", line)
    option = "" if found is None else found[1].replace("-", "_")
    param = next((field for field in sent if options.get(field, field) == option), None)
    if found is not None and param is not None:  # messages name options as on a command line
        line = f"{param}: {line[found.end() :]}"
    return bad_request(line, param=param)


# Fields that do not change an answer, with their types: user and request labels, cache hints.
LABELS: Mapping[str, Any] = {
    "user": str,
    "metadata": dict[str, str],
    "prompt_cache_key": str,
    "prompt_cache_options": dict[str, str],
    "prompt_cache_retention": Literal["in_memory", "in-memory", "24h"],
    "safety_identifier": str,
    "request_id": str,  # vLLM
    "keep_alive": str | float,  # Ollama
    "cache_prompt": bool,  # llama.cpp
}
Neutral = Mapping[str, tuple[JsonValue, ...]]
# Fields of vLLM, llama.cpp and Ollama that are not supported, with the values that are accepted because they have no
# effect, like null and [].
EXTENSIONS_NEUTRAL: Neutral = {
    "best_of": (1,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "mirostat": (0,),
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
STREAM_NEUTRAL: Neutral = {
    "include_usage": (True, False),
    "include_obfuscation": (False,),
    "continuous_usage_stats": (False,),
}


@dataclass(frozen=True, kw_only=True)
class FieldTable:
    """The fields of an endpoint's requests.

    Args:
        options: Fields that set an option of vlm, by name, which checks their values.
        types: Types of fields that the endpoint reads itself.
        labels: Types of fields that have no effect whatever their value.
        neutral: Fields that are not supported, with the values that are accepted because they have no effect.
        remedies: What to use instead of a field that is not supported.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    types: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Any] = field(default_factory=lambda: LABELS)
    neutral: Neutral = field(default_factory=dict)
    remedies: Mapping[str, str] = field(default_factory=dict)

    def check(self, content: Mapping[str, Value]) -> None:
        """Checks the fields of a request without nulls, except the values of options.

        Raises:
            RequestError: A field is unknown, of another type, or has a value that is not supported.
        """
        for name, value in content.items():
            kind = self.types.get(name, self.labels.get(name))
            if kind is not None and not fits(value, kind):
                code = "invalid_value" if fits(value, kind, bounded=False) else "invalid_type"
                raise bad_request(f"{name}: {describe_json_mismatch(value, kind)}", param=name, code=code)
            if kind is None and name not in self.options:
                check_neutral(name, value, self.neutral, remedy=self.remedies.get(name, "remove the field"))
        check_fields("stream_options", content.get("stream_options", {}), STREAM_NEUTRAL)


def check_fields(name: str, fields: Value, neutral: Neutral) -> None:
    """Checks that the fields of an object within a request have values without effect.

    Raises:
        RequestError: One has another value, or is unknown.
    """
    if not isinstance(fields, dict):
        raise bad_request(f"{name}: {describe_json_mismatch(fields, dict)}", param=name, code="invalid_type")
    for key, value in fields.items():
        check_neutral(key, value, neutral, prefix=f"{name}.")


def check_neutral(
    name: str, value: JsonValue, neutral: Neutral, *, prefix: str = "", remedy: str = "remove the field"
) -> None:
    """Rejects a field that is not supported unless its value has no effect.

    Raises:
        RequestError: It has one, or the field is unknown.
    """
    if value == []:
        return
    allowed, param = neutral.get(name), f"{prefix}{printable(name)[:60]}"
    if allowed is None:
        raise bad_request(f"{param}: not supported; remove it", param=param, code="unknown_parameter")
    if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
        values = f"{' and '.join(map(json.dumps, allowed))} {'is' if len(allowed) == 1 else 'are'}"
        raise bad_request(f"{param}: only {values} supported; {remedy}", param=param, code="unsupported_value")


def read_stop_strings(stop: JsonValue) -> list[str]:
    """Returns the stop strings of a request; empty strings are ignored.

    Raises:
        RequestError: The value is something else, or there are too many.
    """
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) and len(text) <= MAX_STOP_LENGTH for text in stops):
        limits = f"up to {MAX_STOPS}, each of up to {MAX_STOP_LENGTH} characters"
        raise bad_request(f"stop: must be a string, or a list of {limits}", param="stop")
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop: has {len(stops):,} strings; the maximum is {MAX_STOPS}", param="stop")
    return [text for text in stops if text]


def check_keys(fields: Mapping[str, JsonValue], allowed: Sequence[str], name: str) -> None:
    """Rejects a key of a message or of a part that is not supported, unless it is empty.

    Clients send earlier answers back with all keys of their message type, such as `refusal`, `tool_calls` and `audio`.

    Raises:
        RequestError: There is one.
    """
    for key, value in fields.items():
        if key not in allowed and value not in ("", [], {}):
            key = printable(key)[:60]
            raise bad_request(f"{name}: {key} is not supported; remove it", param="messages", code="unknown_parameter")


def check_model(name: JsonValue, served: str) -> None:
    """Rejects the name of another model than the one that is served.

    Raises:
        RequestError: It is another.
    """
    if name != served:
        line = f"model: {name!r:.60} does not exist; this service has {served!r}"
        raise RequestError(404, line, param="model", code="model_not_found")


async def read_object(reader: RequestReader, body: bytearray, *, deadline: float) -> dict[str, Any]:
    """Returns the JSON object of a body, without nulls: null is the same as no field, at every level.

    Args:
        body: It is empty afterwards.
        deadline: Time at which the request stops waiting for the budget, by the event loop's clock.
    Raises:
        HTTPException: The body is something else, or the budget is not available in time.
    """
    try:
        content = await reader.run_in_budget(
            deadline,
            len(body),
            parse_json,
            body,
            # In a JSON schema, a constant may be null.
            object_hook=lambda fields: {
                name: value for name, value in fields.items() if value is not None or name == "const"
            },
        )
    except (ValueError, RecursionError) as fault:
        raise bad_request("the body is not JSON", code="invalid_json") from fault
    body.clear()
    if not isinstance(content, dict):
        raise bad_request("the body is not a JSON object", code="invalid_json")
    return content
