"""Accuracy of answers against counts by hand, with the controls, and other scores beside their definitions."""

from itertools import combinations
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlm.data.batch import PromptRows, Targets, TextRows
from vlm.data.records import Question
from vlm.errors import UserError
from vlm.models.context import PLACE
from vlm.randomness import numpy_rng
from vlm.tasks.image_questions.train import (
    FREE_TEXT,
    AnswerMetric,
    ImageQuestions,
    compute_anls,
    process_answer,
    vqa_accuracy,
)

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


def test_questions_without_an_image_have_no_controls(metric):
    """The second of the two texts has no image."""
    tokens = torch.tensor([[PLACE, 5], [5, 5]])
    given = {"references": [*ASKED.values()], "ids": [*ASKED], "image_states": torch.zeros_like(tokens)}
    made = AnswerMetric()
    made.update([*ASKED], [*ASKED.values()], ANSWERS)
    for rows, expected in (
        (PromptRows(tokens, None, Targets(tokens, None), num_states=[1, 0], **given), {"a"}),
        (TextRows(tokens, None, Targets(tokens, None), references=given["references"], ids=given["ids"]), {"a", "b"}),
    ):
        ImageQuestions._add_control(SimpleNamespace(answers=made), "blank", rows, BLANK)
        made.compute()
        assert {row["image_id"] for row in made.answers if "blank" in row} == expected


def by_subsets(answer, answers):
    """The mean over all subsets of nine people, as Antol et al. define it."""
    return fmean(min(sum(one == answer for one in nine) / 3, 1) for nine in combinations(answers, len(answers) - 1))


def test_vqa_accuracy_is_the_mean_over_subsets():
    rng = numpy_rng("answers")
    for _ in range(200):
        answers = [("red", "blue", "green")[at] for at in rng.integers(3, size=10)]
        assert vqa_accuracy("red", answers) == pytest.approx(by_subsets("red", answers))
    agreeing = [["yes"] * n + ["no"] * (10 - n) for n in range(5)]
    assert [round(vqa_accuracy("yes", answers), 3) for answers in agreeing] == [0, 0.3, 0.6, 0.9, 1]


# Values of EvalAIAnswerProcessor in lmms-eval 0.7.3, without its own removal of all commas and question marks.
PROCESSED = {
    "The Cat.": "cat",
    "a red, round ball": "red round ball",
    "red,blue": "red blue",
    "Two dogs": "2 dogs",
    "none": "0",
    "Ten": "10",
    "1,000.5": "1000.5",
    "100,978": "100978",
    "12,500 dollars": "12500 dollars",
    "1,000-2,000": "10002000",  # a comma between digits removes all marks
    "1, 2": "1 2",
    "2.5": "2.5",
    ".5": ".5",
    "5.": "5",
    "U.S.A.": "usa",
    "2:50 pm": "2:50 pm",
    "girl's": "girl's",
    "don't know!": "don't know",
    "dont know": "don't know",
    "couldnt've": "couldn't've",
    "couldn'tve": "couldn't've",
    "couldntve": "couldntve",
    "t-shirt": "t shirt",
    "black - white t-shirt": "black white tshirt",  # a hyphen next to a space removes all hyphens
    "left/right": "left right",
    "(yes)": "yes",
    "50% & $5": "50% & $5",
    "what?": "what",
    "the": "",
    "an a the": "",
    " \t\n": "",
    "...": "",
    "?!": "",
    "two\nred\tballs": "2 red balls",
    "caf\u00e9, \u65e5\u672c": "caf\u00e9 \u65e5\u672c",
}


def test_answers_are_processed_as_in_vqa():
    assert {answer: process_answer(answer) for answer in PROCESSED} == PROCESSED


@pytest.mark.parametrize(
    "text, expected",
    [
        ("its", "it's"),
        ("Im", "i'm"),
        ("Ive", "i've"),
        ("Id've", "i'd've"),
        ("I'dve", "i'd've"),
        ("don\u2019t", "don't"),
    ],
)
def test_contractions_that_the_script_of_vqa_lacks(text, expected):
    assert process_answer(text) == expected == process_answer(expected)


def test_answers_that_vqa_counts_as_equal():
    agree = [("1,000", "1000"), ("Black.", "black"), ("the cat", "cat"), ("two", "2"), ("none", "0"), ("dont", "don't")]
    for one, other in agree:
        assert vqa_accuracy(one, [other] * 10) == vqa_accuracy(other, [one] * 10) == 1
    for one, other in [("girl's", "girls"), ("2:50", "2 50"), ("2.5", "25"), ("$5", "5")]:
        assert vqa_accuracy(one, [other] * 10) == 0


def test_anls_by_hand():
    assert compute_anls("Cat ", ["cat"]) == 1
    assert compute_anls("cart", ["cat", "dog"]) == pytest.approx(3 / 4)
    assert compute_anls("kitten", ["sitting"]) == pytest.approx(1 - 3 / 7)
    assert compute_anls("", [""]) == 1
    # Values of `anls` in lmms-eval 0.7.3, which copies the competitions' script.
    assert compute_anls("ca", ["cats"]) == 0.5 and compute_anls("ca", ["catss"]) == 0
    assert compute_anls("a  b c", ["a b d"]) == pytest.approx(5 / 6)  # divided by the length with extra white space
    assert compute_anls("stra\u00dfe", ["strass"]) == pytest.approx(1 - 2 / 7)  # the longer in upper case has 7 letters


def test_the_metric_takes_any_right_answer_and_scores_captions_apart():
    metric = AnswerMetric(["vqa_accuracy", "anls", "captions"])
    people = tuple(["red"] * 2 + ["crimson"] * 8)
    color = Question("what color?", "crimson", "color", people)
    captions = Question("describe.", "a dog runs", "caption", ("a dog runs", "the dog is running"))
    later = Question("what color?", "blue", "color", before=(("user", "and the cat?"), ("assistant", "no")))
    metric.update(["a"], [[color, captions, later]], [["red", "the dog is running", "blue"]])
    found = metric.compute()
    assert (found["accuracy"], found["accuracy_caption"]) == (1, 1)
    assert found["vqa_accuracy"] == pytest.approx((0.6 + 1 / 6 + 1) / 3)
    assert found["anls"] == 1 and found["bleu4"] == pytest.approx(1, abs=1e-6)
    assert [set(row) & {"answers", "before"} for row in metric.answers] == [{"answers"}, {"answers"}, {"before"}]
    # The same words in another conversation have another answer.
    train = [color, color, later, later._replace(before=())]
    scores = metric.controls([*train, later])
    assert scores["accuracy_color@constant"] == 1


@pytest.mark.parametrize(
    ("answer", "scores", "accuracy", "remedies"),
    [
        ("a dog runs on grass", (), 0.0, [FREE_TEXT]),
        ("a dog runs on grass", ("anls",), 0.0, []),
        ("a dog runs on grass", (), 0.1, None),
        ("red", (), 0.0, None),  # one of few words: the accuracy says what there is to say
    ],
)
def test_an_accuracy_of_0_on_free_text_names_scores_of_partly_right_answers(answer, scores, accuracy, remedies):
    metric = AnswerMetric(scores)
    metric.update(["a"], [[Question("what is this?", answer)]], [["a cat sleeps on a sofa"]])
    metric.compute()
    task: Any = SimpleNamespace(answers=metric)
    assert ImageQuestions.remedies(task, {"accuracy": accuracy}) == remedies
    assert "task.scores=[anls,captions]" in FREE_TEXT
