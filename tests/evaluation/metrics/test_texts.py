"""Edit distance by brute force, and error rates beside torchmetrics."""

import random
from functools import cache

import numpy as np
import pytest
from torchmetrics.functional.text import char_error_rate, word_error_rate

from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.evaluation.metrics.texts import ERROR_RATES, caption_rates, edit_distance, error_counts, error_rates

DRAW = random.Random(0)


def by_recursion(one, other):
    """The definition: the cheapest of the three edits at the ends."""

    @cache
    def distance(left, right):
        if not left or not right:
            return left + right
        same = one[left - 1] == other[right - 1]
        return min(
            distance(left - 1, right) + 1,
            distance(left, right - 1) + 1,
            distance(left - 1, right - 1) + (not same),
        )

    return distance(len(one), len(other))


def test_edit_distance_by_brute_force():
    pairs = [("", ""), ("", "abc"), ("abc", ""), ("kitten", "sitting"), ("é\U0001f642", "e\U0001f642\U0001f642")]
    for longest in (4, 4, 4, 9, 70, 140):  # bits beyond a machine's word too
        for _ in range(60 if longest < 50 else 6):
            one, other = ("".join(DRAW.choices("abc ", k=DRAW.randint(0, longest))) for _ in range(2))
            pairs.append((one, other))
    for one, other in pairs:
        assert edit_distance(one, other) == by_recursion(one, other)
        assert edit_distance(one.split(), other.split()) == by_recursion(one.split(), other.split())


def test_error_rates_are_torchmetrics():
    words = ["a", "red", "Rock", "climbs,", "über", "42"]
    lines = [" ".join(DRAW.choices(words, k=DRAW.randint(1, 9))) for _ in range(40)]
    texts = [" ".join(word for word in line.split() if DRAW.random() > 0.3) + DRAW.choice(["", " x"]) for line in lines]
    rates = error_rates(error_counts(texts, lines).sum(0))
    np.testing.assert_allclose(rates, [char_error_rate(texts, lines), word_error_rate(texts, lines)], rtol=1e-6)
    assert 0.1 < rates[0] < rates[1] < 0.6
    assert caption_rates({"1": "ab"}, {"1": ["ab", "ac"]}) == {}  # several are right


def test_captions_with_one_reference_have_error_rates():
    metric, ids = CaptionMetric(), [str(number) for number in range(30)]
    lines = [f"line {DRAW.randrange(1000)}" for _ in ids]
    texts = [line.replace("9", "8") for line in lines]
    metric.update(ids, texts, [[line] for line in lines])
    scores, bounds = metric.compute(), metric.intervals(seed=0)
    assert scores["cer"] == pytest.approx(float(char_error_rate(texts, lines)))
    for name in ERROR_RATES:
        assert bounds[f"{name}@low"] < scores[name] < bounds[f"{name}@high"]
    metric.update(["30"], ["a"], [["a", "b"]])
    assert "cer" not in metric.compute()
