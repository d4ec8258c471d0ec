"""Rewards against the metrics of whole corpora, and faults of captions by hand."""

import random
from typing import Any

import numpy as np
import pytest

from vlm.errors import UserError
from vlm.evaluation.metrics.cider import DocumentFrequencies
from vlm.evaluation.metrics.coco import References
from vlm.evaluation.metrics.reward import CaptionFaults, CaptionReward
from vlm.evaluation.metrics.tokens import WORDS

DRAWS: dict[str, Any] = {"seed": 0, "ids": "abcd"}


def captions(rng: random.Random, count: int, words: str) -> list[str]:
    return [" ".join(rng.choices(words.split(), k=rng.randint(1, 9))) for _ in range(count)]


def test_rewards_are_the_scores_beside_the_whole_corpus() -> None:
    rng = random.Random(0)
    corpus = [captions(rng, 5, "a red blue dog runs on the grass") for _ in range(60)]
    drawn = [captions(rng, 3, "a red green dog sleeps on the grass") for _ in range(4)]
    found = CaptionReward({"cider": 1.0, "bleu4": 0.5}, corpus)(drawn, corpus[7:11], **DRAWS)
    whole = DocumentFrequencies.of([[WORDS.cut(text) for text in texts] for texts in corpus])
    names = ["a", "b", "c", "d"]
    prepared = References(dict(zip(names, corpus[7:11], strict=True)), whole)
    for column in range(3):
        scores = prepared.score({name: texts[column] for name, texts in zip(names, drawn, strict=True)}).per_image
        asked = [scores[name]["cider"] + 0.5 * scores[name]["bleu4"] for name in names]
        np.testing.assert_allclose(found[:, column], asked, rtol=1e-12)


def test_a_reward_does_not_depend_on_the_batch() -> None:
    corpus = [["a dog runs on the grass", "the dog runs"]] * 20 + [["一只狗在草地上奔跑", "狗在跑"], ["一只猫", "猫"]]
    reward = CaptionReward({"cider": 1.0, "cider_between": -0.5}, corpus)
    drawn, references = [["the dog runs", "a cat"], ["狗在跑", "一只狗 在草地上奔跑"]], [corpus[0], corpus[20]]
    together = reward(drawn, references, seed=0, ids="ab")
    alone = [
        reward([one], [known], seed=0, ids=[id])[0] for one, known, id in zip(drawn, references, "ab", strict=True)
    ]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_what_any_image_would_earn_is_taken_away() -> None:
    rng = random.Random(0)
    corpus = [captions(rng, 5, "a red blue dog runs on the grass") for _ in range(60)]
    drawn = [captions(rng, 3, "a red green dog sleeps on the grass") for _ in range(4)]
    known = corpus[7:11]
    reward = CaptionReward({"cider": 1.0, "cider_between": -0.5}, corpus)
    plain = CaptionReward({"cider": 1.0}, corpus)
    others = [reward.other(texts, 5, id) for texts, id in zip(known, "abcd", strict=True)]
    assert all(other in corpus and other != own for other, own in zip(others, known, strict=True))
    asked = plain(drawn, known, seed=5, ids="abcd") - 0.5 * plain(drawn, others, seed=5, ids="abcd")
    np.testing.assert_allclose(reward(drawn, known, seed=5, ids="abcd"), asked, rtol=1e-12)
    drawn_others = {tuple(reward.other(["none"], step, "a")) for step in range(200)}
    assert len(drawn_others) > 50  # of 60
    two = CaptionReward({"cider_between": 1.0}, [["a dog"], ["a cat"]])
    assert all(two.other(["a dog"], step) == ["a cat"] for step in range(20))


def test_an_unknown_metric_is_named() -> None:
    with pytest.raises(UserError, match=r"task.reward: spice: unknown; use bleu1, .*cider, cider_between"):
        CaptionReward({"spice": 1.0}, [["a dog"]])
    with pytest.raises(UserError, match=r"task.reward: cider_between: needs a second training image"):
        CaptionReward({"cider_between": -1.0}, [["a dog"]])


def test_faults_are_repeated_pairs_and_ends_within_a_phrase() -> None:
    faults = CaptionFaults(["a dog on the grass", "the dog", "a cat of a man", *["the end"] * 2])
    assert faults.shares(["a dog on a", "a dog a dog", "the dog", "the the the"]) == {
        "repeated": 0.5,  # "a dog" and "the the"
        "bad_endings": 0.5,  # "a" and "the" end no caption
    }
    assert faults.shares([""]) == {"repeated": 0.0, "bad_endings": 1.0}
