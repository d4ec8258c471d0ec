"""The HTTP service: answers equal to `vlm caption`, limits, refusals in a line, and an end that loses nothing."""

import asyncio
import base64
import gc
import html
import json
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from zlib import crc32

import pytest
import torch
from PIL import Image
from predictions import predict_inputs
from services import CAPTIONER, CASES, client, client_of, predictor_of, service, tiny
from serving_commands import listening
from tiny_checkpoints import IMAGES, ROOT

from vlm.cli.main import run
from vlm.errors import UserError
from vlm.serving.serve import choose_model_name

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
PHOTOS = [Path(path).read_bytes() for path in IMAGES]


@pytest.fixture(scope="module")
def truth() -> list[dict]:
    """The records of `vlm caption`."""
    return [vars(text) for text in predict_inputs(predictor_of(CAPTIONER), IMAGES)]


def is_same(results: list[dict], truth: list[dict]) -> bool:
    texts = [(one["text"], one["tokens"]) for one in results] == [(one["text"], one["tokens"]) for one in truth]
    return texts and [one["logprob"] for one in results] == pytest.approx([one["logprob"] for one in truth], abs=1e-4)


def test_images_come_in_any_form(truth):
    """Lists of images and forms of them: `test_tasks.py`, for all tasks."""
    http, (one, other) = client(), PHOTOS[:2]
    answer = http.post("/predict", content=one, headers={"Content-Type": "image/png"})
    assert answer.status_code == 200 and list(answer.json()) == ["results"]
    assert set(answer.json()["results"][0]) == {"text", "logprob", "confidence", "tokens", "times"}
    assert is_same(answer.json()["results"], truth[:1])
    for start in ("", "data:image/png;base64,"):
        answer = http.post("/predict", json={"image": start + base64.b64encode(other).decode()})
        assert is_same(answer.json()["results"], truth[1:2])


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ({"content": b"no image"}, 400, "image 1: damaged, or not an image"),
        ({"content": b""}, 400, "image 1: the file is empty"),
        ({"content": bytes(100_001)}, 413, "the body has more than 100,000 bytes"),
        ({"json": {"images": []}}, 422, "0 inputs in a request; send 1 to 64"),
        ({"json": {"images": ["AA=="] * 65}}, 422, "65 inputs in a request"),
        ({"json": {"images": [3]}}, 400, "images: item 1: expected a string, an image in base64"),
        ({"json": {"images": ["AA==", "photo.jpg"]}}, 400, 'images: item 2: "photo.jpg" is not base64; send the file'),
        ({"json": {"image": "http://a.org/b.jpg"}}, 400, 'image: "http://a.org/b.jpg" is not base64; send the file'),
        ({"json": {"image": "data:image/png,abc"}}, 400, 'image: "data:image/png,abc" is not base64; send the file'),
        ({"json": {"images": "AA=="}}, 400, "images: expected a list of strings; image takes one string"),
        ({"json": {"text": "a"}}, 400, 'the JSON has neither image nor images; send {"images": ["BASE64", ...]}'),
        ({"json": ["AA=="]}, 400, "the JSON is not an object; send"),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, "the body is not valid JSON; send"),
        ({"files": [("image", ("a", b"x")), ("image", ("b", b"x"))]}, 400, "image 1: damaged"),
        ({"files": [("image", ("a", b"x")), ("beam", ("b", b"3"))]}, 422, "beam: is not a field for files; upload"),
        ({"files": [("photo", ("a", b"x"))]}, 422, "photo: is not a field for files; upload a file as image (curl"),
        ({"files": [("image", (None, "a.jpg"))]}, 400, "image: expected a file, not the text 'a.jpg'; upload it with"),
        ({"files": [("image", ("a", b"x")), ("tpo", (None, "3"))]}, 422, "tpo: unknown to captioning"),
        ({"data": {"image": "photo.jpg"}}, 415, "URL-encoded forms are not supported; send a multipart form"),
        ({"content": b"x", "params": {"beam": 3}}, 422, "beam: is a query parameter; send options as fields"),
        ({"json": {"image": "AA==", "beam": "x"}}, 422, "beam: expected an integer (at least 1 and at most 1024), not"),
        ({"json": {"image": "AA==", "temperature": "hot"}}, 422, 'temperature: expected a number, not "hot"'),
        ({"json": {"image": "AA==", "ban": 3}}, 422, "ban: expected a list of strings, not 3"),
        ({"json": {"image": "AA==", "sample": "yes"}}, 422, 'sample: expected true or false, not "yes"'),
        ({"json": {"image": "AA==", "tpo": 3}}, 422, "tpo: unknown to captioning"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "boundary"),
    ],
)
def test_bad_input_is_a_line(body, code, line):
    answer = client(max_bytes=100_000).post("/predict", **body)
    assert answer.status_code == code and line in answer.json()["detail"]
    assert len(answer.json()["detail"].splitlines()) == 1 and "Traceback" not in answer.text


@pytest.mark.parametrize("kind", ["JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "PNG"])
def test_a_cut_image_is_reported_in_our_words(kind):
    """Pillow's are "Truncated File Read", "could not create decoder object" and others."""
    file = BytesIO()
    Image.open(BytesIO(PHOTOS[0])).convert("RGB").save(file, kind)
    content = file.getvalue()
    for length in (30, len(content) // 2):
        answer = client().post("/predict", content=content[:length])
        assert answer.status_code == 400
        assert re.fullmatch(
            "image 1: (the file is truncated or damaged|damaged, or not an .*)", answer.json()["detail"]
        )


def test_an_image_of_too_many_pixels_is_refused():
    for side, line in ((2**16, "has more than 67,108,864 pixels"), (9000, "9000 x 9000 is too large")):
        header = b"IHDR" + side.to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
        file = b"\x89PNG\r\n\x1a\n\x00\x00\x00\r" + header + crc32(header).to_bytes(4, "big")
        answer = client().post("/predict", content=file + b"\x00\x00\x00\x00IDAT\x35\xaf\x06\x1e")
        assert answer.status_code == 413 and answer.json()["detail"].startswith(f"image 1: {line}")


def test_a_full_queue_is_503(monkeypatch):
    ours = service(max_queued=1)
    http = client_of(ours)
    monkeypatch.setattr(type(ours.engine), "waiting", property(lambda self: 1))
    answer = http.post("/predict", content=PHOTOS[0])
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "1"


@pytest.mark.slow
def test_a_request_without_new_tokens_ends_with_503_and_frees_its_place(monkeypatch, caplog):
    service_, go = service(max_queued=3, timeout=0.2), threading.Event()
    http, ours = client_of(service_), service_.engine
    real = ours.predictor.encode
    monkeypatch.setattr(ours.predictor, "encode", lambda inputs: go.wait(30) and real(inputs))
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda photo: http.post("/predict", content=photo), PHOTOS[:2]))
    assert [answer.status_code for answer in answers] == [503, 503]
    assert answers[0].json() == {"detail": "no token for 0.2 seconds; try again"}
    assert answers[0].headers["Retry-After"] == "1" and ours.waiting == 0
    go.set()
    service_.timeout = 60
    assert http.post("/predict", content=PHOTOS[0]).status_code == 200
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.slow
def test_the_time_of_reading_a_request_counts_towards_its_first_token(monkeypatch):
    service_ = service(timeout=2)
    http, go, real = client_of(service_), threading.Event(), service_.reader.read

    async def slow(*args, **options):
        await asyncio.sleep(1.5)
        return await real(*args, **options)

    monkeypatch.setattr(service_.reader, "read", slow)
    monkeypatch.setattr(service_.engine.predictor, "encode", lambda inputs: go.wait(30))
    began = time.monotonic()
    assert http.post("/predict", content=PHOTOS[0]).status_code == 503
    assert time.monotonic() - began < 3.4  # else 1.5 + 2
    go.set()


def test_the_key_opens():
    http = client(key="secret")
    assert http.get("/health").json() == {"status": "ok", "task": "captioning"}
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert http.post("/predict", content=PHOTOS[0], headers=headers).status_code == 401
        for path in ("/metrics", "/openapi.json"):
            assert http.get(path, headers=headers).status_code == 401
    headers = {"Authorization": "Bearer secret"}
    assert http.get("/metrics", headers=headers).status_code == 200
    assert http.post("/predict", content=PHOTOS[0], headers=headers).status_code == 200


def test_metrics_count_and_the_schema_is_there():
    http = client()
    http.post("/predict", content=PHOTOS[0])
    http.post("/predict", content=b"x")
    requests = [f'vlm_requests_total{{endpoint="/predict",code="{code}"}} 1' for code in (200, 400)]
    assert {*requests, 'vlm_inputs_total{endpoint="/predict"} 1'} <= {*http.get("/metrics").text.splitlines()}
    assert http.get("/docs").status_code == http.get("/redoc").status_code == 404  # they load scripts of other hosts
    assert "/predict" in http.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"texts": "a red circle"}, "texts: expected a list of strings; text takes one string"),
        ({"texts": {"a": 1}}, "texts: expected a list of strings; text takes one string"),
        ({"text": ["a", "b"]}, "text: expected a string"),
        ({"text": 3}, "text: expected a string"),
    ],
)
def test_texts_are_one_or_a_list(wrong, line):
    http = client(tiny("translation"))
    assert http.post("/predict", json={"text": "a red circle"}).json()["results"][0]["text"]
    answer = http.post("/predict", json=wrong)
    assert answer.status_code == 400 and answer.json()["detail"] == line


@pytest.mark.parametrize(("body", "kind"), [(b"\xff\xfe", "text/plain"), (b'{"text": "\\ud800"}', "application/json")])
def test_texts_are_utf8(body, kind):
    answer = client(tiny("translation")).post("/predict", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 400 and answer.json()["detail"] == "text 1: is not UTF-8"


@pytest.mark.parametrize("task", CASES)
def test_the_start_page_says_what_to_send(task):
    http = client(tiny(task), name="a <b> name")
    answer = http.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert f"A model for {task}." in answer.text and "a &lt;b&gt; name" in answer.text
    (line,) = re.search("<pre>(.*)</pre>", html.unescape(answer.text), re.DOTALL)[1].splitlines()
    *fields, url = shlex.split(line.removeprefix("curl ").replace("-F ", ""))
    assert url == "http://127.0.0.1/predict"
    values = dict(field.split("=", 1) for field in fields)
    form = [(k, ("photo.jpg", PHOTOS[0]) if v.startswith("@") else (None, "a [MASK] cross")) for k, v in values.items()]
    made = http.post("/predict", files=form)
    assert made.status_code == 200 and len(made.json()["results"]) == 1, made.text


def test_the_start_page_does_not_name_the_model_to_those_without_the_key():
    http = client(key="secret", name="plans of ours")
    assert http.get("/").status_code == 200 and "plans" not in http.get("/").text
    assert http.get("/", headers={"Host": "example.org"}).status_code == 421


def test_messages_name_the_task_that_was_trained(tmp_path):
    """A checkpoint of task=conversations holds a model of image_questions."""
    loaded = torch.load(tiny("image_questions"), weights_only=True)
    loaded["vlm"]["config"]["task_name"] = "conversations"
    torch.save(loaded, tmp_path / "model.ckpt")
    http = client(str(tmp_path / "model.ckpt"))
    assert http.get("/health").json()["task"] == "conversations"
    assert "A model for conversations." in http.get("/").text
    answer = http.post("/predict", json={"image": base64.b64encode(PHOTOS[0]).decode()})
    assert answer.status_code == 422 and "conversations" in answer.json()["detail"]
    with pytest.raises(UserError, match="not supported by a model for conversations"):
        client(str(tmp_path / "model.ckpt"), language="de")


@pytest.mark.parametrize(
    ("checkpoint", "run_name", "name"),
    [
        ("runs/birds/2026-11-27_10-00-00/checkpoints/best.ckpt", "birds", "birds"),
        ("birds.ckpt", "captioning", "birds"),
        ("SmolLM2-135M.gguf", None, "SmolLM2-135M"),
        ("hf:ORG/NAME", None, "ORG/NAME"),
        ("models/SmolLM2/", None, "SmolLM2"),
    ],
)
def test_a_model_has_the_name_of_its_run(checkpoint, run_name, name):
    assert choose_model_name(checkpoint, run_name) == name


def test_all_addresses_are_printed(monkeypatch, capsys):
    """Those of each group of paths; for a host that stands for all addresses, this machine's own."""
    monkeypatch.setattr("vlm.serving.serve.listen", lambda app, *, lines, **options: print("\n".join(lines)) or 0)
    assert run(["serve", "-c", CAPTIONER]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["serving     http://127.0.0.1:{port}/predict", "page        http://127.0.0.1:{port}/"]
    assert run(["serve", "-c", CAPTIONER, "--host", "0.0.0.0"]) == 0
    everywhere = capsys.readouterr().out.splitlines()
    assert {*printed} <= {*everywhere} and not any("0.0.0.0" in line for line in everywhere)
    assert run(["serve", "-c", CAPTIONER, "--host", "::1"]) == 0
    assert "serving     http://[::1]:{port}/predict" in capsys.readouterr().out.splitlines()


@pytest.fixture(scope="module")
def served():
    """A service in a process of its own, and its port."""
    pytest.importorskip("uvicorn")
    with listening("serve", "-c", CAPTIONER, "--precision", "fp32") as service:
        yield service


@pytest.mark.slow
def test_the_lines_of_the_page_answer(served, tmp_path):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    lines = [line for line in (ROOT / "docs" / "serving.md").read_text().splitlines() if line.startswith("curl ")]
    lines = [line for line in lines if "photo.jpg" in line]  # the others ask models of texts
    assert len(lines) == 5
    for name in ("photo.jpg", "other.jpg"):
        (tmp_path / name).write_bytes(PHOTOS[0])
    for line in lines:
        line = line.replace("127.0.0.1:8000", f"127.0.0.1:{served[1]}").replace("curl ", "curl --silent ", 1)
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
        answer = done.stdout.rstrip().rpartition("event: result\ndata: ")[2]
        assert ("stream" in line) == (answer != done.stdout) and json.loads(answer)["results"][0]["text"]


@pytest.mark.slow
def test_a_signal_under_load_loses_no_request(served, truth):
    """64 clients; those whose request was taken are answered, and the process ends with 143 in time."""
    process, port = served
    sent, answers = threading.Event(), list[bool]()

    def talk(number: int) -> None:
        http = HTTPConnection("127.0.0.1", port, timeout=30)
        for step in range(number, number + 50):
            place = step % len(PHOTOS)
            try:
                http.request("POST", "/predict", b"no image" if step % 20 == 19 else PHOTOS[place])
                response = http.getresponse()
            except OSError:  # it listens no more, or closed the connection before it took the request
                return
            content = json.loads(response.read())
            good = response.status == 200 and content["results"][0]["text"] == truth[place]["text"]
            answers.append(response.status == 400 if step % 20 == 19 else good)
            if len(answers) >= 200:
                sent.set()

    with ThreadPoolExecutor(64) as pool:
        talks = [pool.submit(talk, number) for number in range(64)]
        while not sent.wait(1):
            assert not all(one.done() for one in talks)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143 and time.monotonic() - start < 10
        for one in talks:
            one.result(30)
    assert len(answers) >= 200 and all(answers) and process.stderr.read() == ""


@pytest.mark.parametrize(
    ("defaults", "asked"),
    [
        ({"beam": 3, "length_penalty": 0.5}, {"sample": True, "seed": 4}),
        ({"beam": 3, "groups": 3, "diversity": 1.0}, {"beam": 1}),
        ({"sample": True, "temperature": 0.5, "top_k": 4}, {"beam": 3}),
        ({"sample": True, "temperature": 0.5, "top_k": 4}, {"sample": False}),
    ],
)
def test_a_request_that_decodes_in_another_way_drops_the_defaults_of_the_first(defaults, asked):
    answer = client(**defaults).post("/predict", json={"image": base64.b64encode(PHOTOS[0]).decode(), **asked})
    truth = predict_inputs(predictor_of(CAPTIONER), IMAGES[:1], **asked)
    assert answer.status_code == 200, answer.text
    assert answer.json()["results"][0]["text"] == truth[0].text
