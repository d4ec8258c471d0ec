"""Fields of chat completion requests: each sets an option, is known to change nothing, or is refused by name."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from starlette.exceptions import HTTPException

from vlm.config.types import describe_json_mismatch, fits
from vlm.errors import printable

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
