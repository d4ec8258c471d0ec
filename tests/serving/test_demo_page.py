"""The page of `vlm demo` over HTTP: what Gradio answers behind the guard, and how a signal ends it."""

import base64
import re
import signal
import threading
import time
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from pages import answers, join, page_of
from predictions import predict_inputs
from serving_commands import listening
from tiny_checkpoints import FILES, IMAGES, ROOT

from vlm.inference.options import ModelOptions
from vlm.inference.predictor import load_predictor
from vlm.serving.demo_forms import DECODING_MODES, Form

pytest.importorskip("gradio")
pytest.importorskip("httpx")
CAPTIONER = str(ROOT / "data" / "sample" / "captioner.ckpt")
PHOTO = "data:;base64," + base64.b64encode(Path(IMAGES[1]).read_bytes()).decode()
WAY = ["greedy", 4, 1.0, 0, 128]
OPTIONS = ["", *WAY]  # no prefix


@pytest.fixture(scope="module")
def http():
    with page_of(CAPTIONER) as client:
        yield client


@pytest.mark.slow
def test_a_photo_is_captioned(http):
    model = ModelOptions(checkpoint=CAPTIONER, device="cpu", precision="fp32").load(load_predictor)
    shown = answers(http, PHOTO, *OPTIONS)[-1]
    assert " ".join(re.findall(r"<b>(\w+)</b>", shown)) == predict_inputs(model, [IMAGES[1]])[0].text
    assert "log-probability" in answers(http, PHOTO, "", "beams", 3, 1.0, 0, 128)[-1]


@pytest.mark.parametrize(
    ("photo", "line"),
    [
        ("data:;base64,AAAA", "photo: damaged, or not an image of a known format"),
        ("data:;base64,A", "photo: is incomplete"),
        ("data:;base64,", "photo: the file is empty"),
        ("large:999999", "photo: is too large; the maximum is 100,000 bytes"),
        ("example:0", "photo: the file is empty"),
        ("/etc/passwd", "photo: the file is empty"),
        ("data:;base64," + base64.b64encode(b"GIF89a" + b"\xff" * 30).decode(), "photo: "),
    ],
)
def test_a_hostile_photo_is_a_line(http, photo, line):
    shown = answers(http, photo, *OPTIONS)[-1]
    assert shown.startswith('<p class="v-refusal" role="alert">' + line) and "Traceback" not in shown


@pytest.mark.parametrize("photo", ["", None])
def test_beams_may_be_chosen_before_a_photo(http, photo):
    shown = answers(http, photo, "", "beams", 3, 1.0, 0, 128)[-1]
    assert shown == '<p class="v-soft">Drop a photo, or choose an example.</p>'


def test_a_model_of_several_languages_has_a_choice_of_them(tmp_path):
    from vlm.serving.demo_page import Page

    asked = []
    answer = lambda values: iter([asked.append(values) or values.options.get("language") or "none"])  # noqa: E731
    form = Form(1, {}, DECODING_MODES, (), answer, ("en", "de"))
    page = Page(task="captioning", name="a.ckpt", form=form, samples=tmp_path, max_bytes=100_000)
    assert list(page.answer(PHOTO, "de", "beams", 3, 1.0, 0, 128)) == ["de"]
    assert (asked[0].mode, asked[0].count) == ("beams", 3)
    assert list(page.answer(PHOTO, "fr", *WAY)) == ["none"]  # whatever was sent
    labels = [one["props"].get("label") for one in page.build_blocks().get_config_file()["components"]]
    assert "Language" in labels
    plain = Page(task="captioning", name="a.ckpt", form=replace(form, languages=()), samples=tmp_path, max_bytes=1)
    labels = [one["props"].get("label") for one in plain.build_blocks().get_config_file()["components"]]
    assert "Decoding" in labels and "Language" not in labels


@pytest.mark.parametrize("options", [["x", 4, 1.0, 0, 128], ["beams", 10**9, 1.0, 0, 128], ["samples", 2, -5, 0, 128]])
def test_options_stay_in_their_bounds(http, options, capfd):
    shown = answers(http, PHOTO, "", *options)
    assert not shown or "v-refusal" in shown[-1] or shown[-1].count('class="v-text"') <= 8


def test_nothing_of_the_disk_or_the_network_is_to_be_had(http):
    assert http.get(f"/gradio_api/file={CAPTIONER}").status_code == 404  # the guard's test has the other paths
    assert http.post("/gradio_api/upload", files={"files": b"x"}).status_code == 404
    page = http.get("/").text
    loaded = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="([^"]*)"', page)
    assert loaded and not [url for url in loaded if url.startswith(("http", "//"))]
    assert not re.search(r"url\([\"']?(https?:)?//|@import", http.get("/theme.css").text)
    assert str(ROOT) not in page and "captioner.ckpt" in page


@pytest.mark.slow
def test_a_text_streams_and_hostile_ones_are_lines():
    with page_of(str(FILES / "language_modeling.ckpt")) as http:
        pieces = answers(http, "A large", "greedy", 4, 1.0, 0, 32)
        assert len(pieces) > 8 and "A large" in pieces[-1] and len(pieces[-1]) > len(pieces[0])
        assert "characters; the maximum is 20,000" in answers(http, "x" * 20_001, "greedy", 4, 1.0, 0, 32)[-1]
        assert "is not UTF-8" in answers(http, "\ud800", "greedy", 4, 1.0, 0, 32)[-1]


@pytest.mark.slow
def test_a_client_may_not_ask_without_end():
    with page_of(str(FILES / "tagging.ckpt"), rate=2) as http:
        for _ in range(2):
            assert "v-tag" in answers(http, "a red circle", False)[-1]
        refused = http.post("/gradio_api/queue/join", json={"data": []})
        assert refused.status_code == 429 and refused.json()["detail"].startswith("more than 2 requests per minute")


@pytest.mark.slow
def test_more_than_the_queue_holds_is_refused(monkeypatch):
    """One request computes, one waits, and the third is told so."""
    from vlm.serving.demo_page import Page

    go = threading.Event()
    monkeypatch.setattr(Page, "answer", lambda self, *inputs: iter([str(go.wait(30))]))
    with page_of(str(FILES / "tagging.ckpt"), queue=1) as http:
        try:
            codes = [join(http, "a red circle", False).status_code for _ in range(4)]
        finally:
            go.set()
    assert codes[0] == 200 and codes[-1] == 503 and sorted(codes) == codes


ASKED = """
import socket, sys
asked = []
connect, resolve = socket.socket.connect, socket.getaddrinfo
socket.socket.connect = lambda self, address: (asked.append(address), connect(self, address))[1]
socket.getaddrinfo = lambda *options, **more: (asked.append(options[0]), resolve(*options, **more))[1]
from vlm.cli.main import run
status = run(sys.argv[1:])
print([one for one in asked if "127.0.0.1" not in str(one)])
sys.exit(status)
"""


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_page(number, status, tmp_path):
    """Also while a page is open in a browser, which holds a connection; no file is left, and no host was asked."""
    options: Any = {"program": ("-c", ASKED), "cwd": tmp_path, "TMPDIR": str(tmp_path)}
    with listening("demo", "-c", CAPTIONER, **options) as (process, port):
        open_page = HTTPConnection("127.0.0.1", port, timeout=30)
        open_page.request("GET", "/gradio_api/heartbeat/session")
        assert open_page.getresponse().status == 200
        start = time.monotonic()
        process.send_signal(number)
        assert process.wait(10) == status and time.monotonic() - start < 10
        assert process.stdout.read() == "[]\n" and process.stderr.read() == "" and list(tmp_path.iterdir()) == []
