"""Requests that were changed at random: each is answered or refused in a line, by any task."""

import json
import random

import pytest
from services import body_of, client, form_of, tiny

from vlm.inference.tasks import TASKS

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
VALUES = [None, True, -1, 0, 3, 10**30, 1e308, float("nan"), 0.5, "", "x", "\ud800", "3"]
VALUES += [[], [1], ["x"] * 3, {}, {"a": 1}]
NAMES = ["top", "beam", "results", "seed", "temperature", "top_k", "top_p", "min_p", "max_tokens", "min_tokens", "ban"]
NAMES += ["require", "prefix", "question", "pair", "label", "prompt", "words", "sample", "groups", "diversity"]
NAMES += ["no_repeat_ngram", "repetition_penalty", "length_penalty", "language", "image", "images", "text", "texts"]


def change_body(task: str, dice: random.Random) -> tuple[bytes, str]:
    """A body of the task, some of whose fields or bytes are others, and its type."""
    body = body_of(task)
    for _ in range(dice.randint(1, 3)):
        if body and dice.random() < 0.3:
            body.pop(dice.choice([*body]), None)
        else:
            body[dice.choice([*body, *NAMES])] = dice.choice(VALUES)
    content = bytearray(json.dumps(body).encode())
    for _ in range(dice.choice([0, 0, 0, 1, 5])):
        content[dice.randrange(len(content))] = dice.randrange(256)
    others = ["", "image/png", "multipart/form-data", "multipart/form-data; boundary=x"]
    return bytes(content), dice.choice(["application/json"] * 8 + others)


@pytest.mark.sample(plain=1, slow=3)
@pytest.mark.parametrize("task", TASKS)
def test_a_changed_request_is_answered_or_refused_in_a_line(task, caplog):
    dice, http = random.Random(task), client(tiny(task), timeout=20)
    for _ in range(100):
        content, kind = change_body(task, dice)
        answer = http.post("/predict", content=content, headers={"Content-Type": kind})
        assert answer.status_code in (200, 400, 413, 422), (content[:300], answer.text)
        if answer.status_code != 200:
            assert len(answer.json()["detail"].splitlines()) == 1
    assert "Traceback" not in caplog.text
    assert http.post("/predict", json=body_of(task)).status_code == 200  # and it goes on
    assert http.post("/predict", files=form_of(task)).status_code == 200
