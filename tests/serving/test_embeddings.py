"""Vectors over HTTP: those of transformers, in both encodings, by the official client, and wrong requests."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hugging import saved_bert
from services import client, tiny
from tiny_checkpoints import IMAGES
from transformers import BertModel

import vlm

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
PATH = "/v1/embeddings"
TEXTS = ["a man in a red shirt", "two dogs", "the children don't play in the blue water!", "", "two dogs"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: Any) -> tuple[Any, Any, Any]:
    """A BERT of transformers whose folder states pooling as sentence-transformers does, its tokenizer, and a client."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(2)
    model, tokenizer = saved_bert(folder, BertModel)
    names = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{name}"}
        for at, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    return model, tokenizer, client(str(folder), name="bert")


def vectors_of(http: Any, value: Any, **fields: Any) -> np.ndarray:
    made = http.post(PATH, json={"input": value, **fields})
    assert made.status_code == 200, made.text
    data = made.json()["data"]
    assert [item["index"] for item in data] == [*range(len(data))]
    assert {item["object"] for item in data} == {"embedding"}
    return np.array([item["embedding"] for item in data], dtype=np.float32)


@torch.no_grad()
def truth_of(model: Any, tokenizer: Any) -> np.ndarray:
    """The mean of the last states of each text, of length 1, as sentence-transformers computes it."""
    found = []
    for text in TEXTS:
        (states,) = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        found.append(torch.nn.functional.normalize(states.mean(0), dim=-1))
    return torch.stack(found).numpy()


def test_texts_and_their_tokens_have_the_vectors_of_transformers(bert: Any) -> None:
    model, tokenizer, http = bert
    truth = truth_of(model, tokenizer)
    np.testing.assert_allclose(vectors_of(http, TEXTS), truth, rtol=0, atol=1e-5)
    np.testing.assert_allclose(vectors_of(http, TEXTS[2]), truth[2:3], rtol=0, atol=1e-5)
    tokens = [tokenizer(text).input_ids for text in TEXTS]
    np.testing.assert_allclose(vectors_of(http, tokens), truth, rtol=0, atol=1e-5)
    np.testing.assert_allclose(vectors_of(http, tokens[0]), truth[:1], rtol=0, atol=1e-5)


def test_the_official_client_gets_equal_vectors_in_both_encodings(bert: Any) -> None:
    openai = pytest.importorskip("openai")
    _, tokenizer, http = bert
    asked = openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http, max_retries=0)
    (model,) = asked.models.list().data
    assert model.id == "bert"
    packed = asked.embeddings.create(model=model.id, input=TEXTS, user="me")  # the client asks for base64
    plain = asked.embeddings.create(model=model.id, input=TEXTS, encoding_format="float")
    assert [item.embedding for item in packed.data] == [item.embedding for item in plain.data]
    count = sum(len(tokenizer(text).input_ids) for text in TEXTS)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens == count
    raw = http.post(PATH, json={"input": TEXTS, "encoding_format": "base64"}).json()["data"]
    numbers = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() for item in raw]
    assert numbers == [item.embedding for item in plain.data]


def test_more_texts_than_the_queue_holds_keep_their_order(bert: Any) -> None:
    *_, http = bert
    many = [f"{number} dogs and {number % 7} cats" for number in range(70)]  # the queue holds 64
    alone = np.concatenate([vectors_of(http, text) for text in many[60:]])
    np.testing.assert_allclose(vectors_of(http, many)[60:], alone, rtol=0, atol=1e-5)


def data_url(path: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(Path(path).read_bytes()).decode()}"


def test_a_dual_encoder_embeds_texts_and_images_of_a_request() -> None:
    http, model = client(tiny("contrastive")), vlm.load(tiny("contrastive"), device="cpu", precision="fp32")
    mixed = vectors_of(http, ["a red circle", data_url(IMAGES[0]), "a cross", data_url(IMAGES[1])])
    truth = [*model.embed(["a red circle", "a cross"]), *model.embed([Path(IMAGES[0]), Path(IMAGES[1])])]
    np.testing.assert_allclose(mixed, np.stack(truth)[[0, 2, 1, 3]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("task", ["translation", "tagging", "text_classification"])
def test_every_encoder_of_texts_has_the_vectors_of_python(task: str) -> None:
    http, model = client(tiny(task)), vlm.load(tiny(task), device="cpu", precision="fp32")
    texts = ["a small red circle", "a large blue cross"]
    np.testing.assert_allclose(vectors_of(http, texts), np.stack(model.embed(texts)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("task", ["captioning", "classification"])
def test_every_encoder_of_images_has_the_vectors_of_python(task: str) -> None:
    http, model = client(tiny(task)), vlm.load(tiny(task), device="cpu", precision="fp32")
    found = vectors_of(http, [data_url(path) for path in IMAGES[:2]])
    np.testing.assert_allclose(found, np.stack(model.embed([*map(Path, IMAGES[:2])])), rtol=0, atol=1e-5)
    made = http.post(PATH, json={"input": "a text"})
    assert made.status_code == 400 and "embeds only images" in made.json()["error"]["message"]


def test_a_language_model_has_no_embeddings() -> None:
    made = client(tiny("language_modeling")).post(PATH, json={"input": "a"})
    assert made.status_code == 404 and "does not embed" in made.json()["error"]["message"]


def test_dimensions_are_those_of_the_model(bert: Any) -> None:
    *_, http = bert
    width = vectors_of(http, "a").shape[1]
    assert vectors_of(http, "a", dimensions=width).shape == (1, width)
    error = http.post(PATH, json={"input": "a", "dimensions": width // 2}).json()["error"]
    assert error["param"] == "dimensions" and f"only {width} is supported" in error["message"]


def test_each_field_of_the_official_client_is_known(bert: Any) -> None:
    create_params = pytest.importorskip("openai.types.embedding_create_params")
    *_, http = bert
    known = {"input": "a", "model": "bert", "dimensions": vectors_of(http, "a").shape[1], "encoding_format": "float"}
    known["user"] = "me"
    assert create_params.EmbeddingCreateParams.__annotations__.keys() == known.keys()
    plain = vectors_of(http, "a")
    for name, value in known.items():
        np.testing.assert_array_equal(vectors_of(http, "a", **({} if name == "input" else {name: value})), plain)
        np.testing.assert_array_equal(vectors_of(http, "a", **({} if name == "input" else {name: None})), plain)


ERROR_FIELDS = ("message", "type", "param", "code")
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "missing": ({}, "input", "send a text"),
    "empty": ({"input": []}, "input", "send a text"),
    "no tokens": ({"input": [[]]}, "input", "has 0 tokens"),
    "mixed": ({"input": ["a", 1]}, "input", "expected"),
    "number": ({"input": 7}, "input", "expected"),
    "unknown token": ({"input": [10**6]}, "input", "is not the id of a token"),
    "long": ({"input": ["a", "dog " * 200]}, "input", "input 2: has 602 tokens; the model reads 1 to 64"),
    "surrogate": ({"input": "\ud800"}, "input", "not UTF-8"),
    "many": ({"input": ["a"] * 2049}, "input", "the maximum is 2,048"),
    "encoding": ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float"),
    "dimensions": ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
    "model": ({"input": "a", "model": "other"}, "model", "does not exist"),
    "unknown": ({"input": "a", "stream": True}, "stream", "not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_requests_are_refused_by_the_name_of_their_field(bert: Any, name: str) -> None:
    *_, http = bert
    body, param, reason = REFUSED[name]
    made = http.post(PATH, content=json.dumps(body), headers={"content-type": "application/json"})
    error = made.json()["error"]
    assert made.status_code == (404 if name == "model" else 400) and error["param"] == param, error
    assert (error["code"] == "context_length_exceeded") == (name == "long") and {*error} == {*ERROR_FIELDS}
    assert reason in error["message"] and error["type"] == "invalid_request_error"


def test_wrong_images_are_refused() -> None:
    http = client(tiny("contrastive"))
    for url, reason in (("data:image/png;base64,!", "not valid base64"), ("data:image/png;base64,AAAA", "input 1: ")):
        made = http.post(PATH, json={"input": [url]})
        assert made.status_code == 400 and reason in made.json()["error"]["message"], made.text
    made = http.post(PATH, json={"input": [data_url(IMAGES[0])] * 65})
    assert made.status_code == 400 and "more than 64 images" in made.json()["error"]["message"]


def test_key_origin_and_body_size_apply() -> None:
    http = client(tiny("tagging"), key="secret")
    assert http.post(PATH, json={"input": "a"}).status_code == 401
    key = {"Authorization": "Bearer secret"}
    assert http.post(PATH, json={"input": "a"}, headers=key).status_code == 200
    assert http.post(PATH, json={"input": "a"}, headers=key | {"Origin": "http://example.org"}).status_code == 403
    small = client(tiny("tagging"), max_bytes=100)
    assert small.post(PATH, json={"input": "a" * 200}).status_code == 413
