"""Requests that are generated from the official client's types: neutral ones change nothing, others are refused."""

import json
import random
from typing import Any

import pytest
import torch
from chats import PATH, USER, image_content, saved_chat
from image_text import saved_image_text
from services import client

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("openai")
from chat_requests import (
    NEUTRAL,
    REQUEST,
    SUPPORTED,
    fields_of,
    neutral_fields,
    unsupported_fields,
    unsupported_messages,
    varied_message,
)

FULL = [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 21)]
BASES: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 3}, {"temperature": 1, "seed": 5}]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, list[list[dict[str, Any]]]]]:
    """Services of two models, each with conversations that it reads."""
    from hugging import photos

    torch.manual_seed(5)
    saved_chat(words := tmp_path_factory.mktemp("words"), "chatml", room=512)
    saved_image_text(images := tmp_path_factory.mktemp("images"), "smolvlm")
    (photo,) = photos(tmp_path_factory.mktemp("photos"), 1)
    system, answer = {"role": "system", "content": "be brief"}, {"role": "assistant", "content": "a red dog"}
    empty = {"role": "assistant", "content": ""}
    asked = {"role": "user", "content": image_content("what is it?", photo)}
    spoken = [[USER], [system, USER], [system, USER, answer, USER], [USER, empty, USER]]
    seen = [[asked], [system, asked, answer, USER]]
    return [(client(str(words)), spoken), (client(str(images)), [*spoken, *seen])]


def answer_of(http: Any, body: dict[str, Any]) -> Any:
    """The status of a request with its text, whole or streamed, and its reason to end, or with its refusal."""
    made = http.post(PATH, json=body)
    if made.status_code != 200:
        return made.status_code, made.json()["error"]["message"]
    if not body.get("stream"):
        choice = made.json()["choices"][0]
        return 200, choice["message"]["content"], choice["finish_reason"]
    events = [json.loads(line[6:]) for line in made.text.split("\n\n") if line.startswith("data: {")]
    choices = [event["choices"][0] for event in events if event["choices"]]
    return 200, "".join(one["delta"].get("content", "") for one in choices), choices[-1]["finish_reason"]


def test_each_field_of_the_client_is_known_to_the_generator() -> None:
    assert fields_of(REQUEST).keys() == NEUTRAL.keys() | SUPPORTED.keys()


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), *FULL])
def test_what_changes_nothing_is_accepted_and_changes_nothing(services: Any, seed: int) -> None:
    dice, plain = random.Random(seed), dict[str, Any]()
    for number in range(60):
        http, conversations = services[number % 2]
        base, messages = dice.choice(BASES) | {"max_tokens": 4}, dice.choice(conversations)
        body = {"messages": messages, **base}
        key = json.dumps([number % 2, body])
        if key not in plain:
            plain[key] = answer_of(http, body)
            assert plain[key][0] == 200, plain[key]
        streamed = {"stream": True} if dice.random() < 0.3 else {}
        # Without a limit of its own, a request may state either field.
        fields = neutral_fields(dice, [*base, *streamed, "max_completion_tokens"])
        varied = body | fields | streamed | {"messages": [varied_message(one, dice) for one in messages]}
        assert answer_of(http, varied) == plain[key], {**fields, "messages": varied["messages"]}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *FULL])
def test_what_is_not_supported_is_refused_by_name(services: Any, seed: int) -> None:
    dice, (http, _) = random.Random(seed), services[1]
    cases = [(name, {"messages": [USER], name: value}) for name, value in unsupported_fields(dice)]
    cases += [(name, {"messages": [message, USER]}) for name, message in unsupported_messages(dice)]
    assert {name for name, _ in cases} > {name for name, known in NEUTRAL.items() if known is not None}
    for name, body in cases:
        status, line = answer_of(http, body)[:2]
        assert status == 400 and name in line and len(line.splitlines()) == 1, (body, line)
