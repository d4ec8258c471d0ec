"""Faults of a captioner as a whole, from captions made by hand."""

import pytest

from vlm.tasks.captioning.metrics import LanguageMetrics

NAMES = [f"{number:02}.jpg" for number in range(40)]
TRUE = [f"a {color} {shape} on {ground}" for color in ("red", "blue", "old", "big") for shape in ("car", "dog")
        for ground in ("sand", "grass", "ice", "mud", "tar")]  # fmt: skip


def found(captions, references=TRUE, unfinished=(), shuffled=None):
    metrics = LanguageMetrics([])
    metrics.reset()
    rows = [captions, [[text] for text in references], [1.0] * 40, [name in unfinished for name in NAMES]]
    metrics.first.update(NAMES, *rows)
    results = metrics.compute() | ({} if shuffled is None else metrics.first.intervals(seed=0) | shuffled)
    return [one.fault for one in metrics.findings(results, max_tokens=9)]


def test_nothing_is_wrong_with_true_captions():
    assert found(TRUE, shuffled={"cider@shuffled": 0.5}) == []


def test_one_caption_for_most_images():
    (fault,) = found(["a dog"] * 25 + TRUE[25:])
    assert fault == "the captions do not depend on the images: 25 of 40 are the same, 'a dog'"


def test_one_caption_that_is_true_of_most_images_is_no_fault():
    assert found(["a dog"] * 40, ["a dog"] * 30 + TRUE[30:]) == []


def test_captions_that_fit_other_images_as_well():
    (fault,) = found([*TRUE[7:], *TRUE[:7]], shuffled={"cider@shuffled": 9.0})
    assert "do not depend on the images" in fault and "9.000 when each is given to another image" in fault


def test_captions_without_end():
    (fault,) = found(TRUE, unfinished=NAMES[:5])
    assert fault == "the captions do not end: 5 of 40 end at the limit of 9 tokens"
    assert found(TRUE, unfinished=NAMES[:4]) == []


@pytest.mark.parametrize("text", ["a a a dog", "a dog on a dog on a dog on", "the man and the man and the man and"])
def test_words_that_repeat(text):
    (fault,) = found([f"{text} {name[:2]}" for name in NAMES[:5]] + TRUE[5:])
    assert fault.startswith("5 of 40 captions repeat words")


def test_words_that_the_data_repeat_too():
    texts = [f"very very very {text}" for text in TRUE]
    assert found(texts, texts) == []
    assert found([f"a dog and a dog {name}" for name in NAMES]) == []


def test_each_language_is_looked_at():
    metrics = LanguageMetrics(["en", "zh"])
    metrics.reset()
    for (_, metric), captions in zip(metrics.items(), (TRUE, ["狗"] * 40), strict=True):
        metric.update(NAMES, captions, [[text] for text in TRUE])
    (finding,) = metrics.findings(metrics.compute(), max_tokens=9)
    assert finding.fault.startswith("zh: the captions do not depend on the images: 40 of 40")
    assert finding.lines()[1].startswith("  1. train longer")
