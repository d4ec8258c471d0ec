"""Spelling mistakes by rule: one edit a word, as often as asked, and the right text beside them."""

from vlm.data.shapes.scene_spelling import LETTERS, SceneSpelling, misspelled
from vlm.data.shapes.scenes import COLORS, RADII, SHAPES
from vlm.randomness import numpy_rng

OPTIONS = {"shapes": list(SHAPES)[:3], "colors": list(COLORS)[:3], "sizes": list(RADII), "seed": 0}
OPTIONS |= {"train_scenes": 300, "val_scenes": 20, "test_scenes": 20}


def edits(word):
    """All words that one mistake makes of a word."""
    for at in range(len(word)):
        yield word[:at] + word[at + 1 :]
        yield word[:at] + word[at] + word[at:]
        yield from (word[:at] + letter + word[at + 1 :] for letter in LETTERS)
        if at + 1 < len(word):
            yield word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def test_a_mistake_is_one_edit():
    for seed in range(300):
        for word in ("red", "yellow", "cross", "diamond"):
            wrong = misspelled(word, numpy_rng("test", seed))
            assert wrong != word and wrong in set(edits(word))


def test_words_are_misspelled_as_often_as_asked_and_the_target_is_right():
    pairs = [
        (wrong, right)
        for record in SceneSpelling(mistakes=0.3, **OPTIONS).split("train").records()
        for wrong, right in zip(record["text"].split(), record["translation"].split(), strict=True)
    ]
    known = {
        word
        for record in SceneSpelling(mistakes=0.0, **OPTIONS).split("train").records()
        for word in record["text"].split()
    }
    assert {right for _, right in pairs} == known
    long = [(wrong, right) for wrong, right in pairs if len(right) >= 3]
    assert abs(sum(wrong != right for wrong, right in long) / len(long) - 0.3) < 0.03
    assert all(wrong == right for wrong, right in pairs if len(right) < 3)
    assert all(wrong == right or wrong in set(edits(right)) for wrong, right in pairs)
