"""Requests for texts that are drawn from the official client's types: each is answered, or refused by name."""

import json
import random
from collections import Counter
from typing import Any

import pytest
import torch
from chats import PATH, USER, saved_chat
from services import client

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("openai")
from chat_requests import (
    COMPLETION,
    COMPLETION_NEUTRAL,
    NEUTRAL,
    REQUEST,
    SUPPORTED,
    fields_of,
    random_fields,
)
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

COMPLETIONS = "/v1/completions"
ENDPOINTS: dict[str, Any] = {
    PATH: (REQUEST, {**NEUTRAL, **SUPPORTED}, {"messages": [USER]}, ChatCompletion, ChatCompletionChunk),
    COMPLETIONS: (COMPLETION, COMPLETION_NEUTRAL, {"prompt": "a red"}, Completion, Completion),
}
BASES: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 3}, {"n": 3, "seed": 5}]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(5)
    saved_chat(folder := tmp_path_factory.mktemp("words"), "chatml", room=64)
    return client(str(folder))


def check_events(text: str, kind: Any) -> None:
    """Checks that the events of a stream are objects of the client's type, and none of them an error."""
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n")[:-1]]
    assert done == "[DONE]" and events
    for event in map(json.loads, events):
        if kind is Completion:  # whose type of a whole answer is that of a part, which has no reason to end yet
            for choice in event["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        kind.model_validate(without_nulls(event))


def without_nulls(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without the nulls of the first token of an echoed prompt, which the client's type does not know."""
    for choice in answer["choices"]:
        shown = choice["logprobs"] or {}
        for name in ("token_logprobs", "top_logprobs"):
            if name in shown:
                assert all(one is not None for one in shown[name][1:])
                shown[name] = [one for one in shown[name] if one is not None]
    return answer


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_drawn_request_is_answered_or_refused_by_name(http: Any, path: str, count: int) -> None:
    request, neutral, base, whole, part = ENDPOINTS[path]
    dice, statuses, refused = random.Random(count), Counter[int](), Counter[str]()
    for _ in range(count):
        body = {"max_tokens": 3, **base, **random_fields(request, neutral, dice)}
        if "max_completion_tokens" in body:
            del body["max_tokens"]
        answer = http.post(path, json=body)
        statuses[answer.status_code] += 1
        if answer.status_code == 200:
            if body.get("stream"):
                check_events(answer.text, part)
            else:
                prompts = body.get("prompt")
                many = isinstance(prompts, list) and not isinstance(prompts[0], int)
                made = whole.model_validate(without_nulls(answer.json()))
                assert len(made.choices) == (body.get("n") or 1) * (len(prompts) if many else 1)
            continue
        error = answer.json()["error"]
        field = str(error["param"]).partition(".")[0]
        assert answer.status_code == (404 if error["code"] == "model_not_found" else 400), (body, error)
        assert field in body and field in error["message"] and error["code"] and error["type"], (body, error)
        assert len(error["message"].splitlines()) == 1 and len(error["message"]) < 500, (body, error)
        refused[field] += 1
    assert statuses[200] > count / 8 and sum(refused.values()) > count / 8 and len(refused) > 5, (statuses, refused)


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_what_changes_nothing_changes_no_completion(http: Any, count: int) -> None:
    assert fields_of(COMPLETION).keys() == COMPLETION_NEUTRAL.keys()
    dice, plain = random.Random(count), dict[str, Any]()
    for _ in range(count):
        base = dice.choice(BASES) | {"max_tokens": 4, "prompt": dice.choice(["a red", [5, 9, 7], ["a", "the dog"]])}
        key = json.dumps(base)
        if key not in plain:
            plain[key] = http.post(COMPLETIONS, json=base).json()["choices"]
        names = [name for name in COMPLETION_NEUTRAL if name not in base and dice.random() < 0.5]
        values = {name: COMPLETION_NEUTRAL[name] for name in names}
        fields = {name: dice.choice([None, *(["b"] if known is None else known)]) for name, known in values.items()}
        answer = http.post(COMPLETIONS, json=base | fields)
        assert answer.status_code == 200 and answer.json()["choices"] == plain[key], (fields, answer.text)
