"""A service under hostile requests: images, texts and bodies without bound, clients that leave, other sites."""

import asyncio
import json
import logging
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from predictions import predict_inputs
from services import CAPTIONER, client, service, tiny
from tiny_checkpoints import IMAGES

from vlm.cli.main import run
from vlm.data.images.image import Preprocess, count_decoded_pixels, load_image

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
PHOTOS = [Path(path).read_bytes() for path in IMAGES]
JSON = {"Content-Type": "application/json"}


def jpeg(width: int, height: int, **options) -> bytes:
    """A photo of gradients and a pattern."""
    file, small = BytesIO(), torch.rand(9, 12, 3, generator=torch.Generator().manual_seed(0))
    image = Image.fromarray((255 * small).byte().numpy()).resize((width, height), Image.Resampling.BICUBIC)
    image.save(file, "JPEG", quality=95, **options)
    return file.getvalue()


@pytest.mark.slow
def test_an_image_is_kept_at_the_size_that_is_needed():
    content = jpeg(2000, 1500)
    assert [load_image(content, min_side=least).size for least in (1500, 700, 300, 180)] == [
        *[(2000, 1500), (1000, 750), (500, 375), (250, 188)]
    ]
    assert count_decoded_pixels(content, min_side=300) == 500 * 375 and count_decoded_pixels(content) == 2000 * 1500
    assert count_decoded_pixels(jpeg(2000, 1500, progressive=True), min_side=300) == 2000 * 1500
    file = BytesIO()
    load_image(content).save(file, "PNG")
    assert load_image(file.getvalue(), min_side=700).size == (1000, 750)
    see = Preprocess(image_size=64)
    whole, part = (see(load_image(content, min_side=least)).float() for least in (None, 256))
    assert (whole - part).abs().mean() < 1  # of 255


def test_images_wait_as_the_model_reads_them():
    """A queue of whole images would hold the memory of all."""
    ours = service(tiny("classification"))
    body = bytearray(jpeg(3000, 2000))
    inputs = asyncio.run(read(ours, "image/jpeg", body)).inputs
    size = ours.predictor.preprocess.image_size
    assert [tuple(one.shape) for one in inputs] == [(3, *size)] and inputs[0].dtype == torch.uint8
    assert ours.reader.budget.used == 0 and body == b""
    answer = client(tiny("classification")).post("/predict", content=PHOTOS[0]).json()["results"]
    assert answer[0]["name"] == predict_inputs(ours.predictor, [IMAGES[0]])[0].name


async def read(ours, kind: str, body: bytearray):
    return await ours.reader.read(kind, body, most=64, deadline=asyncio.get_running_loop().time() + 60)


def test_no_more_pixels_are_decoded_at_a_time_than_the_budget_has(monkeypatch):
    """Of eight large images at once, one is decoded after another, and a small one meanwhile."""
    from vlm.serving import reader as module

    ours, now, most = service(), [], []
    real = module.load_image
    budget = ours.reader.budget

    def load(content, *name, **options):
        now.append(count_decoded_pixels(content, **options))
        most.append(sum(now))
        try:
            return real(content, *name, **options)
        finally:
            now.pop()

    monkeypatch.setattr(module, "load_image", load)
    monkeypatch.setattr(budget, "total", 1_000_000)
    monkeypatch.setattr(budget, "slots", 99)
    file = BytesIO()
    Image.new("RGB", (1000, 900)).save(file, "PNG")

    async def all_at_once():
        await asyncio.gather(*(read(ours, "", bytearray(one)) for one in [file.getvalue()] * 8 + PHOTOS))

    asyncio.run(all_at_once())
    assert len(most) == 8 + len(PHOTOS) and max(most) <= 1_000_000


def test_one_bad_input_keeps_no_other_from_its_answer():
    body = json.dumps({"texts": ["a [MASK] circle", "no gap", "\ud800", "a red [MASK]"]})
    results = client(tiny("masked_language_modeling")).post("/predict", content=body, headers=JSON)
    good, bad, broken, other = results.json()["results"]
    assert good["text"] and other["text"] and bad["error"].startswith("no gap: has no [MASK]")
    assert broken == {"error": "text 3: is not UTF-8"}
    form = [("image", PHOTOS[0]), ("image", b"no image"), ("image", PHOTOS[1])]
    answer = client().post("/predict", files=form)
    first, bad, last = answer.json()["results"]
    assert first["text"] and last["text"] and bad["error"].startswith("image 2: damaged")
    stream = client().post("/predict", files=form, headers={"Accept": "text/event-stream"}).text
    assert {json.loads(part.partition("data: ")[2]).get("input", 0) for part in stream.split("\n\n")[:-1]} == {0, 2}
    assert "image 2: damaged" in stream.rpartition("event: result")[2]
    answer = client(tiny("masked_language_modeling")).post("/predict", json={"texts": ["no gap", "none"]})
    assert answer.status_code == 400 and answer.json()["detail"].startswith("no gap: has no [MASK]")


def test_texts_have_a_bound():
    """What a model does not read is told; one that reads long texts in windows has an end, too."""
    http = client(tiny("translation"))
    short, long = http.post("/predict", json={"texts": ["a red circle", "a red circle " * 200]}).json()["results"]
    assert "truncated" not in short and long["truncated"] is True
    prompt = {"text": "A large " * 400, "max_tokens": 4}
    assert client(tiny("language_modeling")).post("/predict", json=prompt).json()["results"][0]["truncated"] is True
    answer = client(tiny("tagging")).post("/predict", json={"texts": ["a red circle", "a red circle " * 20_000]})
    good, bad = answer.json()["results"]
    assert len(good) == 3 and "the maximum is" in bad["error"]
    assert http.post("/predict", content=b"a " * 600_000).status_code == 413
    story, http = {"text": "a red circle " * 60}, client(tiny("span_answering"))
    assert http.post("/predict", json={**story, "question": "what?"}).status_code == 200
    answer = http.post("/predict", json={**story, "question": ["what?"] * 60})
    assert answer.status_code == 400 and "the maximum is" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (CAPTIONER, b'{"images": [' + b"[]," * 400_000 + b"[]]}", JSON),
        (tiny("translation"), b'{"texts": [' + b"[]," * 400_000 + b"[]]}", JSON),
        (tiny("translation"), b'{"texts": [' + b'"",' * 300_000 + b'""]}', JSON),
        (tiny("translation"), b"[" * 1_000_000, JSON),
        (tiny("translation"), b"x" * 1_100_000, {}),
    ],
)
def test_large_json_without_images_is_refused(path, body, headers):
    answer = client(path).post("/predict", content=body, headers=headers)
    assert answer.status_code in (400, 413, 422) and len(answer.json()["detail"]) < 200


def test_a_form_of_many_parts_is_refused():
    body = b"".join(b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' for _ in range(2000)) + b"--b--\r\n"
    answer = client().post("/predict", content=body, headers={"Content-Type": "multipart/form-data; boundary=b"})
    assert answer.status_code == 413 and "1,024 parts" in answer.json()["detail"]


def test_a_client_that_leaves_in_its_body_is_one_line(caplog):
    from vlm.serving.app import make_app

    ours, sent = service(), []
    messages = [{"type": "http.request", "body": b"abc", "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/predict", "raw_path": b"/predict", "root_path": "", "query_string": b""}
    scope |= {"method": "POST", "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1), "app": None}
    with caplog.at_level(logging.INFO):
        asyncio.run(make_app(ours)(scope, receive, send))
    (record,) = [one for one in caplog.records if one.name.startswith(("vlm", "uvicorn"))]
    assert record.levelname == "INFO" and record.exc_info is None and "disconnected" in record.getMessage()
    assert dict(ours.measurements.requests) == {("/predict", 499): 1}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "example.org"}, 421),
        ({"Host": "127.0.0.1.example.org"}, 421),
        ({"Host": "[::1"}, 421),
        ({"Origin": "http://127.0.0.1"}, 200),
        ({"Origin": "http://example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:9000"}, 403),
    ],
)
def test_pages_of_other_sites_may_not_ask(headers, code):
    assert client().post("/predict", content=PHOTOS[0], headers=headers).status_code == code


def test_an_allowed_origin_may_ask():
    http = client(origins=("https://example.org",))
    headers = {"Host": "example.org", "Origin": "https://example.org"}
    answer = http.post("/predict", content=PHOTOS[0], headers=headers)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://example.org"
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert http.options("/predict", headers=headers | asked).status_code == 200
    assert http.post("/predict", content=PHOTOS[0], headers={"Origin": "https://example.com"}).status_code == 403
    other = {"Host": "example.com", "Origin": "https://example.com"}
    assert client(origins=("*",)).post("/predict", content=PHOTOS[0], headers=other).status_code == 200
    assert client(local=False).post("/predict", content=PHOTOS[0], headers={"Host": "example.com"}).status_code == 200


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://", "https://[x", ""])
def test_what_is_no_origin_is_refused_at_the_start(origin, capsys):
    assert run(["serve", "-c", CAPTIONER, "--allow-origin", origin]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --allow-origin {origin}: ")


@pytest.mark.parametrize("key", ["", " ", "abc\n", "a b", "schlüssel", "a\tb"])
def test_a_key_that_nobody_can_send_is_refused_at_the_start(key, monkeypatch, capsys):
    monkeypatch.setenv("VLM_SERVE_KEY", key)
    assert run(["serve", "-c", CAPTIONER]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: VLM_SERVE_KEY: ")
