"""Exact match and F1 against SQuAD's script, written out anew by its definition, and cases by hand."""

import random
import re
import string

import pytest

from vlm.errors import UserError
from vlm.tasks.shared.text_tasks import MostFrequent, beginnings, overlapping_span
from vlm.tasks.span_answering.train import AnsweredQuestion, SpanMetric, score_answer


def test_cases_by_hand():
    assert score_answer("a cat, the  dog", ["Cat dog"]) == (1, 1)
    assert score_answer("big cat", ["cat", "a big, big cat"]) == pytest.approx((0, 0.8))  # 2 shared of 2 and 3
    assert score_answer("theatre", ["atre"]) == (0, 0)  # an article within a word stays
    assert score_answer("the", ["a"]) == score_answer("", []) == (1, 1)  # nothing is left of either
    assert score_answer("cat", []) == score_answer("", ["the", "cat"]) == (0, 0)


def by_definition(predicted, answers):
    def tokens(text):
        text = "".join(char for char in text.lower() if char not in set(string.punctuation))
        return [word for word in re.sub(r"\b(a|an|the)\b", " ", text).split() if word]

    golds = [answer for answer in answers if tokens(answer)] or [""]
    best = 0.0
    for gold in golds:
        mine, true = tokens(predicted), tokens(gold)
        shared = sum(min(mine.count(word), true.count(word)) for word in set(mine))
        if not mine or not true:
            best = max(best, float(mine == true))
        elif shared:
            precision, recall = shared / len(mine), shared / len(true)
            best = max(best, 2 * precision * recall / (precision + recall))
    return float(any(tokens(predicted) == tokens(gold) for gold in golds)), best


@pytest.mark.slow
def test_every_answer_scores_as_by_definition():
    rng = random.Random(0)
    words = ["a", "the", "An", "red", "Red,", "blue", "-", "circle.", "the-red", "  "]
    text = lambda: " ".join(rng.choices(words, k=rng.randint(0, 4)))  # noqa: E731
    for _ in range(3000):
        predicted, answers = text(), [text() for _ in range(rng.randint(0, 3))]
        truth = by_definition(predicted, answers)
        assert score_answer(predicted, answers) == pytest.approx(truth), (predicted, answers)


def metric(*rows):
    made = SpanMetric()
    made.update(
        [str(n) for n in range(len(rows))], [AnsweredQuestion("q", "c", answers, said, 0.5) for said, answers in rows]
    )
    return made


def test_scores_of_all_and_of_both_kinds():
    found = metric(("cat", ["cat"]), ("big cat", ["cat", "dog"]), ("", []), ("cat", [])).compute()
    truth = {"exact_match": 0.5, "f1": (1 + 2 / 3 + 1) / 4, "exact_match_answerable": 0.5, "f1_answerable": 5 / 6}
    assert found == pytest.approx(truth | {"exact_match_unanswerable": 0.5, "f1_unanswerable": 0.5})
    assert set(metric(("cat", ["cat"])).compute()) == {"exact_match", "f1"}
    made = metric(*[("cat", ["cat" if n % 3 else "dog"]) for n in range(60)])
    found = made.compute() | made.intervals(seed=0)
    assert found["f1@low"] < found["f1"] < found["f1@high"] and found["exact_match@low"] > 0.4
    with pytest.raises(UserError, match="no question"):
        SpanMetric().compute()


def test_the_span_of_most_overlapping_words():
    context = "It rained. The red circle is left of the blue cross. The cross is old."
    assert overlapping_span("what is left of the blue cross?", context) == "red circle"
    assert overlapping_span("what?", "") == "" and overlapping_span("", "all of it") == "all of it"


def test_the_most_frequent_answer_to_a_question():
    pairs = [("what is up?", "sky"), ("what is up?", "sky"), ("what is up?", "air"), ("what is low?", "sea")]
    pairs += [("who came?", "Ann"), *[("where?", "here")] * 9]
    frequent = MostFrequent((beginnings(question), answer) for question, answer in pairs)
    asked = ("What is up?", "what is red?", "who knows?", "why?", "where?", "where is it?")
    answers = [frequent.value(beginnings(question)) for question in asked]
    assert answers == ["sky", "sky", "Ann", "here", "here", "here"]
    assert MostFrequent([]).value(beginnings("why?")) == ""
