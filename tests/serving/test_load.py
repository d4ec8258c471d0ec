"""A service of its own process under load and under attack, by the parts of two scripts in benchmarks/."""

import sys
from pathlib import Path

import pytest
from services import CAPTIONER, tiny
from tiny_checkpoints import IMAGES, ROOT

pytestmark = pytest.mark.slow
pytest.importorskip("uvicorn")
sys.path.append(str(ROOT / "benchmarks"))
import serving_load as load  # noqa: E402
import serving_texts as texts  # noqa: E402

PHOTOS = [Path(path).read_bytes() for path in IMAGES]
MOST_GB = 2.0


@pytest.fixture(scope="module")
def captioner():
    with load.run_service(CAPTIONER, "--precision", "fp32") as service:
        yield service


def test_idle_connections_lock_nobody_out(captioner):
    figures = load.idle(captioner[0], PHOTOS[0])
    assert figures["health"] and figures["status"] == 200


def test_good_requests_among_bad_ones_are_answered_each_by_its_own(captioner):
    truth = [load.ask(captioner[0], photo)[1]["results"][0]["text"] for photo in PHOTOS]
    assert len({*truth}) > 1
    counts = load.send_mixed(captioner[0], PHOTOS, truth, requests=400, clients=16)
    assert {*counts} <= {"good", "good when tried again", "bad refused", "left", "seconds"}
    assert counts["good"] + counts.get("good when tried again", 0) == 300


def test_a_full_queue_is_tried_again():
    with load.run_service(CAPTIONER, "--precision", "fp32", "--queue", "1") as (port, _):
        truth = [load.ask(port, photo)[1]["results"][0]["text"] for photo in PHOTOS]
        counts = load.send_mixed(port, PHOTOS, truth, requests=120, clients=8)
    assert counts.get("good", 0) + counts.get("good when tried again", 0) == 90


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize("kind", ["image", "text"])
def test_an_attack_takes_a_bounded_memory(kind):
    path, body = (CAPTIONER, PHOTOS[0]) if kind == "image" else (tiny("tagging"), b"a red circle")
    with load.run_service(path, "--precision", "fp32", "--timeout", "10") as (port, pid):
        bombs = load.large_images() if kind == "image" else load.long_texts()
        figures = load.attack(port, pid, body, kind, bombs, seconds=10)
        assert load.healthy(port) and load.ask(port, body)[0] == 200
    assert figures["peak_GB"] < MOST_GB and {*figures["good"]} <= {200, 503}


@pytest.mark.parametrize("kind", ["texts", "embeddings"])
def test_openai_answers_under_load_are_those_alone_and_an_attack_takes_a_bounded_memory(kind):
    service = texts.served_model if kind == "texts" else texts.served_embedder
    requests = texts.load_of_texts() if kind == "texts" else texts.load_of_embeddings()
    with service() as (port, pid):
        counts = texts.send_mixed(port, requests, requests=400, clients=16)
        assert counts.pop("distinct answers") >= len(requests.good) - 1
        assert {*counts} <= {"good", "good when tried again", "bad refused", "left", "seconds"}, counts
        assert counts["good"] + counts.get("good when tried again", 0) == 300
        figures = texts.attack(port, pid, requests, seconds=5)
        assert load.healthy(port) and texts.post(port, requests.good[0])[0] == 200
    assert figures["peak_GB"] < MOST_GB and {*figures["good"]} <= {200, 503}
