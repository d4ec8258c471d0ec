"""Masked words: accuracy and its ceiling, pseudo-perplexity by hand, and a training on other texts."""

import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from vlm.data.shapes.scene_labels import SceneWords
from vlm.errors import UserError
from vlm.evaluation.metrics.bootstrap import compute_differences, resamples
from vlm.tasks.masked_language_modeling.train import MaskedMetric, MaskedText
from vlm.tasks.shared.comparison import SampleFiles, select_masked_words
from vlm.training.run.fit import main as train

LOOKS = {"shapes": ["circle", "cross"], "colors": ["red", "blue", "green"], "sizes": ["small", "large"]}


def source(count=40, **options):
    numbers = {"train_captions": count, "val_captions": 10, "test_captions": 10}
    return SceneWords(seed=0, **LOOKS, **numbers | {"max_objects": 2} | options)


def metric(*texts):
    made = MaskedMetric()
    made.update([str(n) for n in range(len(texts))], texts)
    return made


def test_scores_by_hand():
    two = MaskedText("a b c", [0, 2], ["a", "c"], ["a", "x"], math.log(0.25), 3)
    made = metric(two, MaskedText("d", [0], ["d"], ["d"], None, 0))
    assert made.compute() == pytest.approx({"accuracy": 2 / 3, "pseudo_perplexity": 0.25 ** (-1 / 3)})
    chances = {"a": 0.25, "c": 0.25, "d": 0.5}
    found = made.ceiling(lambda words: [chances] * words.count(None))
    assert found == pytest.approx({"accuracy@ceiling": 0.5, "loss@ceiling": math.log(4 * 4 * 2) / 3})
    assert made.ceiling(lambda words: None) == {}
    assert made.constant() == pytest.approx({"accuracy@constant": 1 / 3})
    assert made.intervals(seed=0).keys() == {"accuracy@low", "accuracy@high"}
    with pytest.raises(UserError, match="no word"):
        MaskedMetric().compute()


def test_the_difference_from_the_constant_is_that_of_every_resample_written_out():
    texts = [
        MaskedText("a b a", [0, 1], ["a", "b"], ["a", "b"], None, 0),
        MaskedText("a c c", [0, 2], ["a", "c"], ["b", "c"], None, 0),
        MaskedText("a", [0], ["a"], ["a"], None, 0),
    ]
    made = metric(*texts)
    made.compute(), made.constant()  # the constant is "a"
    gains = []
    for block in resamples(3, 5):
        for counts in block.astype(int):
            drawn = [text for text, times in zip(texts, counts, strict=True) for _ in range(times)]
            pairs = [pair for text in drawn for pair in zip(text.true, text.predicted, strict=True)]
            gains.append(sum((one == other) - (one == "a") for one, other in pairs) / len(pairs))
    model, constant, samples = made.scorers()
    (difference,) = compute_differences(constant, model, samples, seed=5)
    assert difference.value == pytest.approx(4 / 5 - 3 / 5)
    assert [difference.low, difference.high] == pytest.approx(np.quantile(gains, [0.025, 0.975]).tolist())


def test_runs_are_compared_by_the_gaps_of_each_text():
    """Another tokenizer masks other tokens of the same texts."""
    rows = [{"id": "1", "text": "a b", "true": ["a"], "predicted": ["a"]}]
    others = [{"id": "1", "text": "a b", "true": ["b", "a"], "predicted": ["b", "b"]}]
    (one,), (other,) = (select_masked_words(SampleFiles({}, side)).samples[""].values() for side in (rows, others))
    assert one.true == other.true
    names, scorer = select_masked_words(SampleFiles({}, others)).scoring([one, other])
    assert names == ("accuracy",) and scorer(np.array([[1.0, 1.0], [0.0, 2.0]]))[:, 0] == pytest.approx([2 / 3, 0.5])


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
    found = source().word_probabilities([None if word == "_" else word for word in text.split()])
    assert [max(chance.values()) for chance in found] == pytest.approx(chances)
    assert [sum(chance.values()) for chance in found] == pytest.approx([1] * len(chances))


@pytest.mark.slow
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
        expected = drawn.word_probabilities([None] * length)[4]
        assert expected.keys() == counts.keys()
        assert all(abs(number / sum(counts.values()) - expected[word]) < 0.03 for word, number in counts.items())


TINY = ["trainer=cpu", "callbacks.progress=null", "data.num_workers=0", "data.batch_size=8", "test=false"]
TINY += ["model.size.dim=16", "model.size.num_heads=2", "model.size.encoder_depth=1", "trainer.max_steps=2"]
LINES = [
    f"the {color} {thing} is near." for color in ("red", "green", "blue", "gray") for thing in ("cat", "dog", "cow")
]


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize("kind", ["file", "folder", "csv", "jsonl"])
def test_texts_without_labels_train(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for place in range(0, 12, 3):
        (tmp_path / "folder" / f"{place}.txt").write_text("\n\n".join(LINES[place : place + 3]))
    (tmp_path / "file.txt").write_text("\n".join(LINES))
    (tmp_path / "table.csv").write_text("\n".join(["text", *LINES]))
    (tmp_path / "table.jsonl").write_text("\n".join(json.dumps({"text": line, "label": None}) for line in LINES))
    data = {
        "file": ["data=text", "data.path=file.txt"],
        "folder": ["data=text", "data.root=folder"],
        "csv": ["data=texts", "data.path=table.csv"],
        "jsonl": ["data=texts", "data.path=table.jsonl"],
    }
    assert train(["task=masked_language_modeling", *data[kind], *TINY]) == 0
    (metrics,) = tmp_path.glob("runs/*/*/metrics.csv")
    assert len(metrics.read_text().splitlines()) > 1
