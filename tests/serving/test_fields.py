"""Errors in OpenAI's form: each names its field and has a code that programs can read."""

from typing import Any

import pytest
import torch
from chats import PATH, USER, saved_chat
from services import client

pytest.importorskip("fastapi")
pytest.importorskip("httpx")


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(5)
    saved_chat(folder := tmp_path_factory.mktemp("words"), "chatml", room=64)
    return client(str(folder), key="secret")


ERRORS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "unknown": ({"nonsense": 1}, "nonsense", "unknown_parameter"),
    "not supported": ({"modalities": ["audio"]}, "modalities", "unsupported_value"),
    "another type": ({"stream": "yes"}, "stream", "invalid_type"),
    "inside a field": ({"stream_options": {"speed": 1}}, "stream_options.speed", "unknown_parameter"),
    "an option out of range": ({"top_p": 3}, "top_p", "invalid_value"),
    "an option by its other name": ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    "a stop that is none": ({"stop": [1]}, "stop", "invalid_value"),
    "another model": ({"model": "gpt-9"}, "model", "model_not_found"),
    "no message": ({"messages": []}, "messages", "invalid_value"),
    "a long message": (
        {"messages": [{"role": "user", "content": "word " * 99}]},
        None,
        "context_length_exceeded",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_names_its_field_and_has_a_code(http: Any, name: str) -> None:
    fields, param, code = ERRORS[name]
    body = {"messages": [USER], "max_tokens": 2} | fields
    if "max_completion_tokens" in fields:
        del body["max_tokens"]
    error = http.post(PATH, json=body, headers={"Authorization": "Bearer secret"}).json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code), error


def test_an_error_of_the_status_has_its_code(http: Any) -> None:
    assert http.post(PATH, json={}).json()["error"]["code"] == "invalid_api_key"
    bearer = {"Authorization": "Bearer secret"}
    assert http.post(PATH, content=b"{", headers=bearer).json()["error"]["code"] == "invalid_json"
    assert http.get(PATH, headers=bearer).json()["error"]["code"] == "method_not_allowed"
    assert http.get("/v1/nowhere", headers=bearer).json()["error"]["code"] == "not_found"
