"""Rewards against the metrics of whole corpora, and faults of captions by hand."""

import random

import numpy as np

from vlm.evaluation.metrics.cider import DocumentFrequencies
from vlm.evaluation.metrics.coco import References
from vlm.evaluation.metrics.tokens import WORDS
from vlm.tasks.captioning.reward import CaptionFaults, CaptionReward


def captions(rng: random.Random, count: int, words: str) -> list[str]:
    return [" ".join(rng.choices(words.split(), k=rng.randint(1, 9))) for _ in range(count)]


RNG = random.Random(0)
CORPUS = [captions(RNG, 5, "a red blue dog runs on the grass") for _ in range(60)]
DRAWN, KNOWN = [captions(RNG, 3, "a red green dog sleeps on the grass") for _ in range(4)], CORPUS[7:11]


def test_rewards_are_the_scores_beside_the_whole_corpus() -> None:
    found = CaptionReward({"cider": 1.0, "bleu4": 0.5}, CORPUS)(DRAWN, KNOWN)
    whole = DocumentFrequencies.of([[WORDS.cut(text) for text in texts] for texts in CORPUS])
    names = ["a", "b", "c", "d"]
    prepared = References(dict(zip(names, KNOWN, strict=True)), whole)
    for column in range(3):
        scores = prepared.score({name: texts[column] for name, texts in zip(names, DRAWN, strict=True)}).per_image
        asked = [scores[name]["cider"] + 0.5 * scores[name]["bleu4"] for name in names]
        np.testing.assert_allclose(found[:, column], asked, rtol=1e-12)


def test_a_reward_does_not_depend_on_the_batch() -> None:
    corpus = [["a dog runs on the grass", "the dog runs"]] * 20 + [["一只狗在草地上奔跑", "狗在跑"], ["一只猫", "猫"]]
    reward = CaptionReward({"cider": 1.0, "cider_constant": -0.5}, corpus)
    drawn, references = [["the dog runs", "a cat"], ["狗在跑", "一只狗 在草地上奔跑"]], [corpus[0], corpus[20]]
    together = reward(drawn, references)
    alone = [reward([one], [known])[0] for one, known in zip(drawn, references, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_what_any_image_would_earn_is_taken_away() -> None:
    plain = CaptionReward({"cider": 1.0}, CORPUS)
    beside_all = np.stack([plain(DRAWN, [texts] * 4) for texts in CORPUS]).mean(0)
    asked = plain(DRAWN, KNOWN) - 0.5 * beside_all
    reward = CaptionReward({"cider": 1.0, "cider_constant": -0.5}, CORPUS)
    np.testing.assert_allclose(reward(DRAWN, KNOWN), asked, rtol=1e-12)


def test_faults_are_repeated_pairs_and_ends_within_a_phrase() -> None:
    faults = CaptionFaults(["a dog on the grass", "the dog", "a cat of a man", *["the end"] * 2])
    assert faults.shares(["a dog on a", "a dog a dog", "the dog", "the the the"]) == {
        "repeated": 0.5,  # "a dog" and "the the"
        "bad_endings": 0.5,  # "a" and "the" end no caption
    }
    assert faults.shares([""]) == {"repeated": 0.0, "bad_endings": 1.0}
