"""Answers of `vlm serve` as server-sent events, times of tokens, and clients that go away."""

import json
import re
import socket
import time
from pathlib import Path

import pytest
from services import client_of, running, service, tiny
from tiny_checkpoints import IMAGES

from vlm.nn.step.replay import Stepper

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
PHOTOS = [Path(path).read_bytes() for path in IMAGES]
STREAM = {"Accept": "text/event-stream"}
FORM = [("image", (f"{place}.png", photo)) for place, photo in enumerate(PHOTOS)]


@pytest.fixture(scope="module")
def captions():
    return service(rows=4)


def events(answer) -> list[tuple[str, dict]]:
    """The events of an answer, by the form of the standard."""
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    parts = [re.fullmatch(r"event: (\w+)\ndata: ([^\n]*)", part) for part in answer.text.split("\n\n") if part]
    assert answer.text.endswith("\n\n") and all(parts)
    return [(part[1], json.loads(part[2])) for part in parts]


@pytest.mark.parametrize("options", [{}, {"sample": True, "results": 2}], ids=["greedy", "sampled"])
def test_tokens_come_one_by_one_and_then_the_result(captions, options):
    ours = service(rows=4, **options) if options else captions
    http = client_of(ours)
    *tokens, (name, last) = events(http.post("/predict", files=FORM, headers=STREAM))
    assert name == "result" and {name for name, _ in tokens} == {"token"}
    results = [result if options else [result] for result in last["results"]]
    assert len(results) == len(PHOTOS)
    for place, texts in enumerate(results):
        for number, text in enumerate(texts):
            own = [one for _, one in tokens if (one["input"], one["result"]) == (place, number)]
            assert [one["token"] for one in own] == text["tokens"] and own[-1]["text"] == text["text"]
            assert all(text["text"].startswith(one["text"]) for one in own)
            assert [one["seconds"] for one in own] == text["times"] == sorted(text["times"])
    plain = http.post("/predict", files=FORM).json()["results"]
    same = [[text["tokens"] for text in (texts if options else [texts])] for texts in plain]
    assert same == [[text["tokens"] for text in texts] for texts in results]


@pytest.mark.slow
def test_times_are_seconds_from_acceptance(captions, monkeypatch):
    real = Stepper.logits
    monkeypatch.setattr(Stepper, "logits", lambda *args: time.sleep(0.05) or real(*args))
    (result,) = client_of(captions).post("/predict", content=PHOTOS[0]).json()["results"]
    assert len(result["times"]) == len(result["tokens"]) and result["times"][0] >= 0.05
    assert all(0.05 <= b - a < 1 for a, b in zip(result["times"], result["times"][1:], strict=False))


def test_beams_and_models_that_write_nothing_answer_by_the_result_alone():
    for ours in (service(beam=3, results=2), service(tiny("classification"))):
        answer = client_of(ours).post("/predict", content=PHOTOS[0], headers=STREAM)
        ((name, last),) = events(answer)
        (result,) = last["results"]
        assert name == "result" and (isinstance(result, dict) or len(result) == 2)
        for text in result if isinstance(result, list) else ():
            assert len(text["times"]) == len(text["tokens"]) and len({*text["times"]}) == 1


def test_a_fault_is_an_event_and_bad_input_a_status(captions, monkeypatch, caplog):
    http = client_of(captions)
    answer = http.post("/predict", content=b"no image", headers=STREAM)
    assert answer.status_code == 400 and answer.json()["detail"].startswith("image 1: damaged")
    monkeypatch.setattr(captions.predictor, "encode", lambda batch: 1 / 0)
    assert events(http.post("/predict", content=PHOTOS[0], headers=STREAM)) == [
        ("error", {"detail": "the model failed; its log says why"})
    ]
    assert "ZeroDivisionError" in caplog.text


@pytest.fixture
def listening(captions, monkeypatch):
    """A service on a port, whose steps take a while, and the steps that it took."""
    pytest.importorskip("uvicorn")
    from vlm.serving.app import make_app

    steps, real = [], Stepper.logits
    monkeypatch.setattr(Stepper, "logits", lambda *args: (steps.append(1), time.sleep(0.1), real(*args))[2])
    with running(make_app(captions), log_level="warning") as port:
        yield port, steps


@pytest.mark.slow
@pytest.mark.parametrize("accept", ["text/event-stream", "*/*"])
def test_a_client_that_goes_away_frees_its_row(captions, listening, accept):
    """Nine tokens are left of its caption when it goes."""
    port, steps = listening
    head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\nContent-Length: {len(PHOTOS[1])}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(head.encode() + PHOTOS[1])
        while not steps:
            time.sleep(0.005)
        if accept != "*/*":
            while b"event: token" not in line.recv(4096):
                pass
        taken = len(steps)
    while captions.engine.running:
        time.sleep(0.005)
    assert taken <= 2 and len(steps) <= taken + 3
