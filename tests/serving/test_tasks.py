"""Every task is served: its inputs, what stands beside them, and its options, as the task declares them."""

import base64
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image
from predictions import predict_inputs
from services import CASES, TEXTS, body_of, client, form_of, predictor_of, tiny
from tiny_checkpoints import IMAGES

from vlm.inference.options import get_options
from vlm.inference.tasks import TASKS

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
tasks = pytest.mark.parametrize("task", TASKS)


def check_same(answer: Any, truth: Any) -> None:
    """Compares an answer in JSON with the result in Python."""
    truth = truth.tolist() if isinstance(truth, np.ndarray) else truth
    if isinstance(truth, Image.Image):
        picture = Image.open(BytesIO(base64.b64decode(answer)))
        assert picture.format == "PNG" and picture.size == truth.size and picture.tobytes() == truth.tobytes()
    elif isinstance(truth, list):
        assert len(answer) == len(truth)
        for one, other in zip(answer, truth, strict=True):
            check_same(one, other)
    elif isinstance(truth, tuple) and not hasattr(truth, "_asdict"):
        check_same(answer, list(truth))
    elif hasattr(truth, "_asdict") or hasattr(truth, "__dict__"):
        fields = truth._asdict() if hasattr(truth, "_asdict") else vars(truth)
        assert {*answer} - {"times", "truncated"} == {*fields}
        for name, value in fields.items():
            check_same(answer[name], value)
    elif isinstance(truth, dict):
        assert [*answer] == [*truth] and list(answer.values()) == pytest.approx(list(truth.values()), abs=1e-4)
    else:
        assert answer == (pytest.approx(truth, abs=1e-4) if isinstance(truth, float) else truth)


def test_the_cases_are_all_tasks():
    assert {*CASES} == {*TASKS}


@tasks
def test_answers_are_those_of_python(task):
    inputs, options = CASES[task]
    truth, http = predict_inputs(predictor_of(tiny(task)), inputs, **options), client(tiny(task))
    for request in ({"json": body_of(task)}, {"files": form_of(task)}):
        answer = http.post("/predict", **request)
        assert answer.status_code == 200, answer.text
        check_same(answer.json()["results"], truth)


WRONG_OPTIONS = [
    ({"nonsense": 1}, "nonsense"),
    ({"batch_size": 3}, "batch_size"),
    ({"workers": 1}, "workers"),
    ({"trace": "file"}, "trace"),
    ({"labels": "/etc/passwd"}, "labels"),
    ({"top": 0}, "top"),
    ({"top": 10**9}, "top"),
    ({"top": "many"}, "top"),
    ({"question": 3}, "question"),
    ({"question": ["?"] * 65}, "question"),
    ({"label": []}, "label"),
    ({"max_tokens": 10**6}, "max_tokens|room"),
    ({"beam": 1000}, "beam|exceed the maximum|top-k"),
    ({"seed": 10**30}, "seed"),
    ({"temperature": 0.5, "sample": False}, "temperature|sample"),
]
# Each task has every third option, and each option every third task; all pairs are tried nightly.
PAIRS = [
    pytest.param(task, *wrong, marks=[] if (place + number) % 3 == 0 else pytest.mark.nightly, id=f"{task}-{number}")
    for place, task in enumerate(TASKS)
    for number, wrong in enumerate(WRONG_OPTIONS)
]


@pytest.mark.parametrize(("task", "wrong", "word"), PAIRS)
def test_an_option_that_is_wrong_is_a_line(task, wrong, word):
    """Unknown, of another type, out of range, or for whoever runs the service alone."""
    answer = client(tiny(task)).post("/predict", json={**body_of(task), **wrong})
    line = answer.json().get("detail", "")
    assert answer.status_code == 422 and len(line.splitlines()) == 1, answer.text
    assert any(one in line for one in word.split("|"))


@tasks
def test_what_must_stand_beside_an_input_is_asked_for(task):
    kind = predictor_of(tiny(task)).options
    for name, option in get_options(kind).items():
        if option.input_kind and name in ("question", "label", "image"):
            left_out = {name, "images"} if name == "image" else {name}
            body = {key: value for key, value in body_of(task).items() if key not in left_out}
            answer = client(tiny(task)).post("/predict", json=body)
            assert answer.status_code == 422 and name in answer.json()["detail"]


def test_a_path_of_a_client_opens_no_file():
    for name, value in (("image", IMAGES[0]), ("images", IMAGES[:2])):
        body = {"texts": TEXTS, name: value}
        answer = client(tiny("photo_translation")).post("/predict", json=body)
        assert answer.status_code == 400 and answer.json()["detail"].startswith(f"{name}: ")
    answer = client(tiny("span_answering")).post("/predict", json={"text": IMAGES[0], "question": "what?"})
    assert answer.json()["results"][0]["text"] in ("", *IMAGES[0].split("/"), IMAGES[0]) or answer.status_code == 200
