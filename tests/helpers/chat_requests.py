"""Generates chat completion requests from the types of the official client: each field, message and part."""

import random
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

from openai.types import completion_create_params as openai_completion
from openai.types.chat import ChatCompletionMessage, completion_create_params
from typing_extensions import get_type_hints, is_typeddict

REQUEST = completion_create_params.CompletionCreateParamsNonStreaming
# Values that change nothing, by the client's reference of each field. None stands for all values of its type.
NEUTRAL: dict[str, list[Any] | None] = {
    "audio": [],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "metadata": None,
    "modalities": [["text"], []],
    "moderation": [],
    "parallel_tool_calls": None,
    "prediction": [],
    "prompt_cache_key": None,
    "prompt_cache_options": None,
    "prompt_cache_retention": None,
    "reasoning_effort": ["none"],  # of models that write no thoughts
    "safety_identifier": None,
    "service_tier": ["auto", "default"],
    "store": [False],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "user": None,
    "verbosity": ["medium"],
    "web_search_options": [],
}
# Fields that set something, with values that are the default.
SUPPORTED: dict[str, list[Any]] = {
    "messages": [],
    "model": [],
    "max_completion_tokens": [],
    "max_tokens": [],
    "frequency_penalty": [0, 0.0],
    "logit_bias": [{}, {"5": 0}],
    "logprobs": [False],
    "n": [1],
    "presence_penalty": [0, 0.0],
    "response_format": [{"type": "text"}, {}],
    "seed": [],
    "stop": ["", [], [""]],
    "stream": [False],
    "stream_options": [{}, {"include_usage": False}, {"include_obfuscation": False}, {"include_usage": None}],
    "temperature": [],
    "top_logprobs": [0],
    "top_p": [1, 1.0],
}
STORED = {name: [None, [], ""] for name in ChatCompletionMessage.model_fields if name not in ("role", "content")}


def fields_of(kind: Any) -> dict[str, Any]:
    """The fields of a TypedDict with their types, without `Required`."""
    return {name: _inner(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def required_of(kind: Any) -> set[str]:
    hints = get_type_hints(kind, include_extras=True)
    return {*kind.__required_keys__} | {name for name, hint in hints.items() if get_origin(hint) is Required}


def _inner(hint: Any) -> Any:
    return _inner(get_args(hint)[0]) if get_origin(hint) in (Required, NotRequired, Annotated) else hint


def value_of(hint: Any, dice: random.Random) -> Any:
    """Draws a value of a type of the client."""
    kind, args = get_origin(hint), get_args(hint)
    if kind in (Required, NotRequired, Annotated):
        return value_of(args[0], dice)
    if kind in (Union, UnionType):
        return value_of(dice.choice([one for one in args if one is not type(None)]), dice)
    if kind is Literal:
        return dice.choice(args)
    if is_typeddict(hint):
        needed = required_of(hint)
        fields = fields_of(hint).items()
        return {name: value_of(one, dice) for name, one in fields if name in needed or dice.random() < 0.5}
    if kind in (dict, Mapping) or hint in (dict, object):
        key, value = args or (str, str)
        return {str(value_of(key, dice)): value_of(value, dice) for _ in range(dice.randint(1, 3))}
    if kind in (list, Iterable) or hasattr(kind, "__iter__") or "Sequence" in str(kind):
        return [value_of(args[0], dice) for _ in range(dice.randint(1, 3))]
    drawn = {bool: dice.random() < 0.5, int: dice.randint(1, 20), float: dice.choice([0.5, 1.5, -0.5])}
    return drawn.get(hint, dice.choice(["a", "red", "x1"]))


def is_neutral(name: str, value: Any) -> bool:
    known = NEUTRAL[name]
    return value in (None, []) or known is None or any(value == one and type(value) is type(one) for one in known)


def neutral_fields(dice: random.Random, taken: Iterable[str]) -> dict[str, Any]:
    """Draws fields of a request that change nothing: neutral values, nulls, values of labels."""
    hints, drawn = fields_of(REQUEST), dict[str, Any]()
    for name in hints:
        if name in ("messages", *taken) or dice.random() < 0.6:
            continue
        known = SUPPORTED.get(name, NEUTRAL.get(name, []))
        choices = [None, *([value_of(hints[name], dice)] if known is None else known)]
        drawn[name] = dice.choice(choices)
    return drawn


def unsupported_fields(dice: random.Random) -> Iterator[tuple[str, Any]]:
    """Yields each field that is not supported, with a value that would change something."""
    hints = fields_of(REQUEST)
    for name in NEUTRAL:
        drawn = [value_of(hints[name], dice) for _ in range(40)]
        yield from [(name, value) for value in drawn if not is_neutral(name, value)][:4]


def varied_message(message: Mapping[str, Any], dice: random.Random) -> dict[str, Any]:
    """Returns a message in another form of the client that means the same."""
    varied = dict(message)
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        part: dict[str, Any] = {"type": "text", "text": content}
        part |= dice.choice([{}, {}, {"prompt_cache_breakpoint": {"mode": "explicit"}}, {"image_url": None}])
        choices: list[Any] = [content, [part]]
        choices += [None, []] if not content and role == "assistant" else []
        varied["content"] = dice.choice(choices)
    else:
        varied["content"] = [_varied_part(part, dice) for part in content]
    if dice.random() < 0.3:
        varied["name"] = dice.choice([None, "someone"])
    if role == "assistant":
        if dice.random() < 0.3:  # as the client stores an answer
            varied = {**ChatCompletionMessage(role="assistant", content=content).model_dump(), **varied}
        names = [name for name in STORED if dice.random() < 0.3]
        varied |= {name: dice.choice(STORED[name]) for name in names}
    elif dice.random() < 0.2:
        varied |= {dice.choice([*STORED]): dice.choice([None, []])}
    return {"role": "developer" if role == "system" and dice.random() < 0.5 else role} | {
        name: value for name, value in varied.items() if name != "role"
    }


def _varied_part(part: Mapping[str, Any], dice: random.Random) -> dict[str, Any]:
    varied = {**part} | dice.choice([{}, {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}])
    if part["type"] == "image_url":
        varied["image_url"] = {**part["image_url"]} | dice.choice(
            [{}, {"detail": None}, *({"detail": one} for one in ("auto", "low", "high", "original"))]
        )
    return varied


def unsupported_messages(dice: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields messages and parts that are not supported, with the name that a refusal must have."""
    from openai.types.chat import (
        ChatCompletionAssistantMessageParam,
        ChatCompletionFunctionMessageParam,
        ChatCompletionToolMessageParam,
    )
    from openai.types.chat.chat_completion_assistant_message_param import ContentArrayOfContentPart
    from openai.types.chat.chat_completion_content_part_param import ChatCompletionContentPartParam

    for kind in (ChatCompletionToolMessageParam, ChatCompletionFunctionMessageParam):
        yield "role", value_of(kind, dice)
    hints = fields_of(ChatCompletionAssistantMessageParam)
    for name in hints.keys() - {"role", "content", "name"}:
        yield name, {"role": "assistant", "content": "a", name: value_of(hints[name], dice)}
    for role, union in (("user", ChatCompletionContentPartParam), ("assistant", ContentArrayOfContentPart)):
        for kind in get_args(union):
            part = value_of(kind, dice)
            if part["type"] not in ("text", "image_url"):
                yield part["type"], {"role": role, "content": [part]}
    text = {"type": "text", "text": "a"}
    yield "sound", {"role": "user", "content": [text | {"sound": "b"}]}
    link = {"url": "data:image/png;base64,AAAA", "crop": [1]}
    yield "crop", {"role": "user", "content": [{"type": "image_url", "image_url": link}]}


COMPLETION = openai_completion.CompletionCreateParamsNonStreaming
# As NEUTRAL and SUPPORTED, of completions.
COMPLETION_NEUTRAL: dict[str, list[Any] | None] = {
    "best_of": [1],
    "echo": [False],
    "frequency_penalty": [0, 0.0],
    "logit_bias": [{}, {"5": 0}],
    "logprobs": [],
    "max_tokens": [],
    "model": [],
    "n": [1],
    "presence_penalty": [0, 0.0],
    "prompt": [],
    "seed": [],
    "stop": ["", [], [""]],
    "stream": [False],
    "stream_options": [{}, {"include_usage": False}, {"include_obfuscation": False}],
    "suffix": [""],
    "temperature": [],
    "top_p": [1, 1.0],
    "user": None,
}
# Values of fields that are in range, beside those that change nothing.
IN_RANGE: dict[str, list[Any]] = {
    "echo": [True],
    "frequency_penalty": [-2, 0.5, 2],
    "logit_bias": [{"7": -100, "9": 3.5}],
    "logprobs": [True, 0, 3, 20],
    "max_completion_tokens": [1, 5],
    "max_tokens": [0, 1, 5],
    "model": ["vlm"],
    "n": [2, 8],
    "presence_penalty": [-2, 0.5],
    "prompt": ["", "a red", ["a", "the dog"], [5, 9], [[5], [9, 12]]],
    "seed": [0, 2**40],
    "stop": ["a", ["b", "ab"]],
    "stream": [True],
    "stream_options": [{"include_usage": True}],
    "temperature": [0, 0.7, 1.9],
    "top_logprobs": [1, 20],
    "top_p": [0, 0.4],
}
JUNK = [-1, 10**30, 1e300, 0.5, "x", "\u0000", True, [3], [None], {"a": {"b": 1}}, [[[]]], {}]  # of any type


def random_fields(kind: Any, neutral: Mapping[str, list[Any] | None], dice: random.Random) -> dict[str, Any]:
    """Draws fields of a request, most of them valid: neutral, in range, of the client's type, or anything."""
    drawn = dict[str, Any]()
    for name, hint in fields_of(kind).items():
        if name == "messages" or dice.random() < 0.65:
            continue
        kinds = [[None], neutral.get(name) or [], IN_RANGE.get(name, []), IN_RANGE.get(name, [])]
        kinds += [[value_of(hint, dice)]] if dice.random() < 0.2 else []
        kinds += [JUNK] if dice.random() < 0.05 else []
        drawn[name] = dice.choice(dice.choice([values for values in kinds if values]))
    return drawn
