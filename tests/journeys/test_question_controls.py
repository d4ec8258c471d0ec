"""Answers beside other images: which image that is depends on the split alone."""

import json
from pathlib import Path

import pytest

from vlm.cli.main import run as vlm
from vlm.tasks.image_questions import train as image_questions
from vlm.tasks.image_questions.predict import ImageAnswer

CHECKPOINT = Path(__file__).parents[1] / "checkpoint" / "files" / "image_questions.ckpt"


@pytest.fixture(autouse=True)
def images_are_named(monkeypatch):
    """Has every answer name the image that the question was asked beside, by the sum of its states."""

    def answer(model, tokenizer, context, questions, *, max_tokens):
        names = [f"{states.sum():.2f}" for states in context.states]
        return [[ImageAnswer(name)] * len(asked) for name, asked in zip(names, questions, strict=True)]

    monkeypatch.setattr(image_questions, "answer_questions", answer)


def answers(folder: Path, batch: int) -> list[dict]:
    options = [f"data.eval_batch_size={batch}", "data.source.test_scenes=3"]
    assert vlm(["evaluate", "-c", str(CHECKPOINT), "--device", "cpu", "--out", str(folder), *options]) == 0
    return json.loads((folder / "details.json").read_text())["questions"]


def test_neither_batches_nor_a_lone_image_change_the_control(tmp_path) -> None:
    one, together = answers(tmp_path / "1", 1), answers(tmp_path / "3", 3)
    assert one == together
    own = {row["image_id"]: row["predicted"] for row in one}
    assert len(set(own.values())) == 3
    first, second, third = own  # the questions about each are asked beside the image whose partner it is
    beside = {row["image_id"]: row["shuffled"] for row in one}
    assert beside == {first: own[third], second: own[first], third: own[second]}
