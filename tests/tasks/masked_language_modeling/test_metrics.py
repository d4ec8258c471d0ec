"""Accuracy beside the ceiling of a grammar, and pseudo-perplexity, by hand."""

import math
from collections import Counter, defaultdict

import pytest

from vlm.data.shapes.scene_words import SceneWords
from vlm.errors import UserError
from vlm.tasks.masked_language_modeling.metrics import Filled, MaskedMetric

LOOKS = {"shapes": ["circle", "cross"], "colors": ["red", "blue", "green"], "sizes": ["small", "large"]}


def source(count=40, **options):
    numbers = {"train_captions": count, "val_captions": 10, "test_captions": 10}
    return SceneWords(seed=0, **LOOKS, **numbers | {"max_objects": 2} | options)


def metric(*texts):
    made = MaskedMetric()
    made.update([str(n) for n in range(len(texts))], texts)
    return made


def test_scores_by_hand():
    two = Filled("a b c", [0, 2], ["a", "c"], ["a", "x"], math.log(0.25), 3)
    made = metric(two, Filled("d", [0], ["d"], ["d"], None, 0))
    assert made.compute() == pytest.approx({"accuracy": 2 / 3, "pseudo_perplexity": 0.25 ** (-1 / 3)})
    chances = {"a": 0.25, "c": 0.25, "d": 0.5}
    found = made.ceiling(lambda words: [chances] * words.count(None))
    assert found == pytest.approx({"accuracy@ceiling": 0.5, "loss@ceiling": math.log(4 * 4 * 2) / 3})
    assert made.ceiling(lambda words: None) == {}
    assert made.constant() == pytest.approx({"accuracy@constant": 1 / 3})
    assert made.intervals(seed=0).keys() == {"accuracy@low", "accuracy@high"}
    with pytest.raises(UserError, match="no word"):
        MaskedMetric().compute()


@pytest.mark.parametrize(
    ("text", "chances"),
    [
        ("a _ red circle", [1 / 2]),
        ("a small _ circle", [1 / 3]),
        ("_ small red _", [1, 1 / 2]),
        # No kind stands in a scene twice, so the other circle is no small one.
        ("a small red circle left _ a _ red circle", [1, 1]),
        ("a small red circle _ a large red cross", [1 / 2]),  # above or below: the others are two words
        ("a small red circle _ of a large red cross", [1 / 2]),
        ("a small red circle _ _ a large red cross", [1 / 2, 1]),
    ],
)
def test_chances_by_hand(text, chances):
    found = source().chances([None if word == "_" else word for word in text.split()])
    assert [max(chance.values()) for chance in found] == pytest.approx(chances)
    assert [sum(chance.values()) for chance in found] == pytest.approx([1] * len(chances))


def test_chances_are_those_of_many_captions():
    """Of drawn captions with the same words around a gap, the share of each word there."""
    found = defaultdict(Counter)
    drawn = source(12000)
    split = drawn.open("train")
    for index in range(12000):
        words = split.record(index)["words"]
        if len(words) > 4:
            found[len(words)][words[4]] += 1  # the word after the first object
    for length, counts in found.items():
        expected = drawn.chances([None] * length)[4]
        assert expected.keys() == counts.keys()
        assert all(abs(number / sum(counts.values()) - expected[word]) < 0.03 for word, number in counts.items())
