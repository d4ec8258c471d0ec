"""Accuracy of answers against counts by hand, with the controls."""

import pytest

from vlm.data.records import Question
from vlm.errors import UserError
from vlm.tasks.image_questions.metrics import AnswerMetric

ASKED = {
    "a": [Question("what color?", "red", "color"), Question("how many?", "two", "count")],
    "b": [Question("what color?", "blue", "color")],
}
ANSWERS = [["red", "one"], ["blue"]]
SHUFFLED, BLANK = [["blue", "two"], ["red"]], [["red", "red"], ["red"]]


@pytest.fixture
def metric():
    made = AnswerMetric()
    for place, (id, questions) in enumerate(ASKED.items()):  # batches of one image
        made.update([id], [questions], [ANSWERS[place]])
        made.update([id], [questions], [BLANK[place]], "blank")
    for place, (id, questions) in reversed([*enumerate(ASKED.items())]):  # each with the batch of its partner
        made.update([id], [questions], [SHUFFLED[place]], "shuffled")
    return made


def test_accuracy_in_all_and_by_kind(metric):
    assert metric.compute() == {"accuracy": 2 / 3, "accuracy_color": 1.0, "accuracy_count": 0.0}
    assert [row["predicted"] for row in metric.answers] == ["red", "one", "blue"]
    interval = metric.intervals(seed=0)
    assert interval["accuracy@low"] <= 2 / 3 <= interval["accuracy@high"]
    made = AnswerMetric()
    with pytest.raises(UserError, match="no question"):
        made.compute()
    made.update(["a"], [[Question("q?", "x")]], [["x"]])
    assert made.compute() == {"accuracy": 1.0}  # of no kind


def test_controls_by_hand(metric):
    metric.compute()
    train = [Question("what color?", "blue", "color")] * 2 + [Question("what color?", "red", "color")]
    train += [Question("how many dogs?", "two", "count")]  # not asked word for word: the kind decides
    scores = metric.controls(train)
    assert scores["accuracy@constant"] == pytest.approx(2 / 3) and scores["accuracy_color@constant"] == 0.5
    assert scores["accuracy@shuffled"] == pytest.approx(1 / 3) and scores["accuracy_count@shuffled"] == 1.0
    assert scores["accuracy@blank"] == pytest.approx(1 / 3)


def test_a_question_counts_under_the_controls_that_it_was_asked_under():
    made = AnswerMetric()
    made.update(["a"], [ASKED["a"]], [["red", "one"]])
    made.update(["b"], [ASKED["b"]], [["blue"]], "shuffled")  # its own image could not be read
    assert made.compute() == {"accuracy": 0.5, "accuracy_color": 1.0, "accuracy_count": 0.0}
    assert [row["image_id"] for row in made.answers] == ["a", "a"]
    assert not [name for name in made.controls([]) if "shuffled" in name or "blank" in name]
