"""/metrics follows the conventions of Prometheus, and its numbers are those of the requests that were sent."""

import re
import time
from threading import Event
from typing import Any

import pytest
import torch
from chats import PATH, USER, saved_chat
from services import client_of, service, tiny

from vlm.data.text.conversation import Turn
from vlm.inference.command_options import ChatOptions
from vlm.tasks.chat.predictor import TurnWithImages

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
SAMPLE = re.compile(r'(\w+)(?:\{((?:\w+="[^"\\\n]*",?)+)\})? ([\d.]+(?:e-?\d+)?)')


def read_metrics(http: Any) -> Samples:
    """The value of each sample; checks the rules of the text format."""
    made = http.get("/metrics")
    assert made.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert made.text.endswith("\n")
    kinds, helped, samples = dict[str, str](), set[str](), Samples()
    for line in made.text.splitlines():
        if line.startswith("# HELP "):
            name, about = line[7:].split(" ", 1)
            assert name not in helped and about.endswith(".")
            helped.add(name)
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ")
            assert name in helped and name not in kinds
            kinds[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            family = max((name for name in kinds if match[1].startswith(name)), key=len)
            assert family == [*kinds][-1]  # samples of a family are together
            suffixes = ("_bucket", "_sum", "_count") if kinds[family] == "histogram" else ("",)
            assert match[1].removeprefix(family) in suffixes
            assert (kinds[family] == "counter") == family.endswith("_total")
            key = match[1], tuple(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            assert key not in samples
            samples[key] = float(match[3])
    for family in (name for name, kind in kinds.items() if kind == "histogram"):
        endpoints = {dict(labels)["endpoint"] for name, labels in samples if name == f"{family}_count"}
        for endpoint in endpoints:
            of_endpoint = {name: labels for name, labels in samples if dict(labels).get("endpoint") == endpoint}
            buckets = [
                (float(dict(labels)["le"]), count)
                for (name, labels), count in samples.items()
                if name == f"{family}_bucket" and dict(labels)["endpoint"] == endpoint
            ]
            assert buckets == sorted(buckets) and [count for _, count in buckets] == sorted(c for _, c in buckets)
            assert buckets[-1] == (float("inf"), value_of(samples, f"{family}_count", endpoint))
            assert f"{family}_sum" in of_endpoint
    return samples


def value_of(samples: Samples, name: str, endpoint: str = "", **labels: str) -> float:
    given = {"endpoint": endpoint} if endpoint else {}
    return samples[name, tuple({**given, **labels}.items())]


@pytest.fixture(scope="module")
def words(tmp_path_factory: Any) -> str:
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("words")
    saved_chat(folder, "chatml", room=256)
    return str(folder)


def test_each_endpoint_is_counted_with_its_times_and_tokens(words: str) -> None:
    http = client_of(service(words))
    assert value_of(read_metrics(http), "vlm_inputs_total", PATH) == 0
    begun, tokens = time.monotonic(), 0
    for stream in (False, True):
        body = {"messages": [USER], "max_tokens": 7, "seed": 1, "stream": stream, "n": 2}
        made = http.post(PATH, json=body)
        assert made.status_code == 200
        tokens += 0 if stream else made.json()["usage"]["completion_tokens"]
    assert http.post(PATH, json={"messages": []}).status_code == 400
    assert http.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 3}).status_code == 200
    spent = time.monotonic() - begun
    samples = read_metrics(http)
    assert value_of(samples, "vlm_requests_total", PATH, code="200") == 2
    assert value_of(samples, "vlm_requests_total", PATH, code="400") == 1
    assert value_of(samples, "vlm_inputs_total", PATH) == 4
    assert value_of(samples, "vlm_inputs_total", "/v1/completions") == 2
    assert value_of(samples, "vlm_tokens_total", PATH) == 2 * tokens  # the same answers, whole and streamed
    assert value_of(samples, "vlm_request_seconds_count", PATH) == 3
    assert value_of(samples, "vlm_time_to_first_token_seconds_count", PATH) == 4
    assert value_of(samples, "vlm_tokens_per_second_count", PATH) == 4
    first = value_of(samples, "vlm_time_to_first_token_seconds_sum", PATH)
    total = sum(value_of(samples, "vlm_request_seconds_sum", path) for path in (PATH, "/v1/completions"))
    assert 0 < first / 2 < total < spent  # of two choices at the same time
    assert value_of(samples, "vlm_waiting", PATH) == value_of(samples, "vlm_running", PATH) == 0
    assert value_of(samples, "vlm_cache_tokens", PATH) == 0


def test_the_queue_and_the_cache_show_what_runs(words: str, monkeypatch: Any) -> None:
    ours = service(words, rows=2)
    predictor, reached, released = ours.chat.predictor, Event(), Event()
    usual = type(predictor).append_token

    def wait(self: Any, reply: Any, *args: Any) -> None:
        usual(self, reply, *args)
        if len(reply.tokens) == 3:
            reached.set()
            released.wait(30)

    monkeypatch.setattr(type(predictor), "append_token", wait)
    turn = Turn("user", "a")
    options = ChatOptions(max_tokens=5, sample=False, batch_size=1)
    prompt = predictor.prepare([TurnWithImages(turn)], options)
    jobs = ours.engine.submit([prompt], options, predictor=predictor, endpoint=PATH)
    assert reached.wait(30)
    others = ours.engine.submit([prompt, prompt], options, predictor=predictor, endpoint=PATH)
    samples = read_metrics(client_of(ours))
    assert value_of(samples, "vlm_waiting", PATH) == 2 and value_of(samples, "vlm_running", PATH) == 1
    assert value_of(samples, "vlm_waiting", "/predict") == 0
    assert value_of(samples, "vlm_cache_tokens", PATH) == len(prompt.tokens) + 2  # the third is not reported yet
    assert value_of(samples, "vlm_queue_capacity") == 64
    released.set()
    for job in (*jobs, *others):
        job.answer.result(30)


def test_prompts_of_predict_count_in_the_cache() -> None:
    ours = service(tiny("language_modeling"))
    (job,) = ours.engine.submit(["A large"], ours.predictor.options(max_tokens=4))
    job.answer.result(30)
    assert job.count_cached_tokens() == len(ours.predictor.tokenizer.encode("A large")) + len(job.times[0])


def test_models_without_tokens_have_no_token_times() -> None:
    http = client_of(service(tiny("tagging")))
    assert http.post("/predict", json={"text": "a red circle"}).status_code == 200
    assert http.post("/v1/embeddings", json={"input": ["a", "b"]}).status_code == 200
    samples = read_metrics(http)
    assert value_of(samples, "vlm_inputs_total", "/predict") == 1
    assert value_of(samples, "vlm_inputs_total", "/v1/embeddings") == 2
    assert not any(name.startswith("vlm_time_to_first_token_seconds_") for name, _ in samples)
