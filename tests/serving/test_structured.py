"""Texts of a stated form over HTTP: by the official client, streamed, several in a batch, and wrong requests."""

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from chats import PATH, USER, saved_chat
from services import client, running, service, tiny

from vlm.decoding.grammar import GrammarSource

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")

COMPLETIONS = "/v1/completions"
ENGINE_THREAD = "vlm serve"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "none": {"const": None}, "ok": {"type": "boolean"}},
    "required": ["name", "none", "ok"],
    "additionalProperties": False,
}
STRICT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
LOOSE = {"type": "json_schema", "json_schema": {"name": "answer", "description": "of the model", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def words(tmp_path_factory: Any) -> str:
    """A folder of a model that converses in words."""
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("words")
    saved_chat(folder, "chatml", room=1024)
    return str(folder)


@pytest.fixture(scope="module")
def http(words: str) -> Any:
    return client(words)


def choices(http: Any, **fields: Any) -> list[tuple[str, str]]:
    """The texts of a request with the reasons of their ends: of a prompt if it is given, else of a conversation."""
    path, body = (COMPLETIONS, fields) if "prompt" in fields else (PATH, {"messages": [USER], **fields})
    made = http.post(path, json={"seed": 1, "max_tokens": 500, **body})
    assert made.status_code == 200, made.text
    texts = [(one.get("text") or one["message"]["content"], one["finish_reason"]) for one in made.json()["choices"]]
    return texts


def test_the_official_client_gets_valid_json_whole_and_streamed(http: Any) -> None:
    openai = pytest.importorskip("openai")
    asked = openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http, max_retries=0)
    options: dict[str, Any] = {"model": "vlm", "messages": [USER], "seed": 3, "max_tokens": 500}
    answer = asked.chat.completions.create(**options, response_format=STRICT).choices[0]
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    assert answer.finish_reason == "stop"
    with asked.chat.completions.create(**options, response_format=LOOSE, stream=True) as stream:
        parts = [chunk.choices[0] for chunk in stream]
    assert "".join(part.delta.content or "" for part in parts) == answer.message.content
    assert parts[-1].finish_reason == "stop"


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "schema": ({"response_format": LOOSE}, ""),
    "vLLM's schema": ({"structured_outputs": {"json": SCHEMA}}, ""),
    "vLLM's schema as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ""),
    "choice": ({"structured_outputs": {"choice": ["up", "down é"]}}, "up|down é"),
    "pattern": ({"structured_outputs": {"regex": "[a-c]{2,5}!"}}, "[a-c]{2,5}!"),
}


@pytest.mark.sample(plain=3, slow=7)
@pytest.mark.parametrize("start", [{}, {"prompt": "the"}])
@pytest.mark.parametrize("name", FORMS)
def test_each_form_and_each_choice_of_a_request(http: Any, name: str, start: dict[str, Any]) -> None:
    fields, pattern = FORMS[name]
    texts = choices(http, **fields, **start, n=2)
    assert len(texts) == 2 and {reason for _, reason in texts} == {"stop"}
    for text, _ in texts:
        if pattern:
            assert re.fullmatch(pattern, text)
        else:
            jsonschema.validate(json.loads(text), SCHEMA)
    assert texts == choices(http, **fields, **start, n=2)  # the seed decides


@pytest.mark.parametrize(
    "form", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object_and_a_text_that_is_cut(http: Any, form: dict[str, Any]) -> None:
    ((text, reason),) = choices(http, **form, max_tokens=40)
    assert text.lstrip().startswith("{")
    assert reason == "length" or isinstance(json.loads(text), dict)
    assert choices(http, structured_outputs={"regex": "a{90}"}, max_tokens=20)[0][1] == "length"


@pytest.mark.slow
def test_conversations_of_different_forms_share_a_batch_and_answer_as_alone(words: str) -> None:
    """On one more service, whose batches have more rows than requests."""
    import httpx

    from vlm.serving.app import make_app

    requests: list[dict[str, Any]] = [fields for fields, _ in FORMS.values()]
    requests = [*requests, {"max_tokens": 30}] * 2
    with running(make_app(service(words)), log_level="error") as port, httpx.Client(timeout=60) as http:
        http.base_url = f"http://127.0.0.1:{port}"  # type: ignore[assignment]
        alone = [choices(http, **fields) for fields in requests]
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(lambda fields: choices(http, **fields), requests))
    assert together == alone


def test_a_text_format_changes_nothing_and_raw_log_probabilities_stay(http: Any) -> None:
    assert choices(http, response_format={"type": "text"}, max_tokens=9) == choices(http, max_tokens=9)
    body = {"messages": [USER], "logprobs": True, "top_logprobs": 2, "seed": 1, "temperature": 0}
    free = http.post(PATH, json={**body, "max_tokens": 1}).json()["choices"][0]["logprobs"]["content"][0]
    made = http.post(PATH, json={**body, "structured_outputs": {"choice": ["é"]}}).json()["choices"][0]
    (first, *_) = made["logprobs"]["content"]
    assert made["message"]["content"] == "é"
    assert first["top_logprobs"][0]["logprob"] == free["top_logprobs"][0]["logprob"]  # of the logits without a mask


def test_schemas_compile_on_a_thread_that_neither_answers_nor_decodes(http: Any, monkeypatch: Any) -> None:
    compiled, check = list[bool](), GrammarSource.check

    def record(self: GrammarSource) -> None:
        compiled.append(asyncio._get_running_loop() is None and threading.current_thread().name != ENGINE_THREAD)
        check(self)

    monkeypatch.setattr(GrammarSource, "check", record)
    assert ENGINE_THREAD in [thread.name for thread in threading.enumerate()]
    assert choices(http, structured_outputs={"choice": ["one"]}) == [("one", "stop")]
    assert choices(http, prompt="a", structured_outputs={"choice": ["two"]}) == [("two", "stop")]
    predict = client(tiny("language_modeling"))
    assert predict.post("/predict", json={"text": "A", "choice": ["red"]}).status_code == 200
    assert len(compiled) == 3 and all(compiled)


def test_predict_takes_the_options_of_the_command() -> None:
    http = client(tiny("language_modeling"))
    body: dict[str, Any] = {"text": "A large", "choice": ["red", "blue"]}
    assert http.post("/predict", json=body).json()["results"][0]["text"] in ("red", "blue")
    body = {"texts": ["A large", "a"], "json_schema": {"enum": [7]}, "max_tokens": 32, "seed": 2}
    for result in http.post("/predict", json=body).json()["results"]:
        assert json.loads(result["text"]) == 7
    wrong = http.post("/predict", json={"text": "A", "json_schema": "file.json"})
    assert wrong.status_code == 422 and wrong.json()["detail"].startswith("json_schema: ")
    wrong = http.post("/predict", json={"text": "A", "regex": "a", "beam": 2})
    assert wrong.status_code == 422 and "--regex and --beam exclude each other" in wrong.json()["detail"]


def of_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}}


DEEP: Any = {}
for _ in range(400):
    DEEP = {"items": DEEP}
EXTENSION = "structured_outputs"
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "kind": ({"response_format": {"type": "xml"}}, "response_format.type", "text, json_object, json_schema"),
    "no object": ({"response_format": "json"}, "response_format", "expected an object"),
    "unknown key": ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "not supported"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    "empty schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "missing",
    ),
    "strict": (of_schema({}, strict="yes"), "response_format.json_schema.strict", "expected"),
    "list": (of_schema([]), "response_format.json_schema.schema", "expected an object"),
    "keyword": (of_schema({"type": "array", "uniqueItems": True}), "response_format", "uniqueItems"),
    "long": (of_schema({"title": "x" * 70_000}), "response_format", "65,536"),
    "deep": (of_schema(DEEP), "response_format", "recursion limit"),
    "number": (of_schema({"multipleOf": 10**6}), "response_format", "multipleOf"),
    "endless": (of_schema({"$ref": "#"}), "response_format", "no text can end"),
    "pattern": ({EXTENSION: {"regex": "(a"}}, EXTENSION, "unclosed group"),
    "choices": ({EXTENSION: {"choice": []}}, EXTENSION, "1 to 1,024"),
    "numbers": ({EXTENSION: {"choice": [1]}}, f"{EXTENSION}.choice", "strings"),
    "grammar": ({EXTENSION: {"grammar": "root ::= x"}}, f"{EXTENSION}.grammar", "json, regex, choice"),
    "two": ({EXTENSION: {"regex": "a", "choice": ["b"]}}, EXTENSION, "exclude each other"),
    "both": ({EXTENSION: {"regex": "a"}, **of_schema({})}, EXTENSION, "exclude each other; send one"),
    "text of no JSON": ({EXTENSION: {"json": "{"}}, f"{EXTENSION}.json", "is not JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_form_is_refused_by_the_name_of_its_field(http: Any, name: str) -> None:
    fields, param, reason = REFUSED[name]
    for path, body in ((PATH, {"messages": [USER]}), (COMPLETIONS, {"prompt": "a"})):
        made = http.post(path, json={**body, **fields})
        error = made.json()["error"]
        assert made.status_code == 400 and error["param"] == param, error
        assert reason in error["message"] and error["message"].startswith(param.split(".")[0])
