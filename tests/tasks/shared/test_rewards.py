"""Rewards of sampled texts, beside the scores of whole corpora, and errors of functions of the user."""

import importlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vlm.config import target
from vlm.data.fields import CaptionField
from vlm.data.records import ListSplit, Question, Record
from vlm.data.text.tokenizer import ByteTokenizer
from vlm.errors import UserError
from vlm.evaluation.metrics.coco import References
from vlm.evaluation.metrics.ngrams import DocumentFrequencies, Floats
from vlm.evaluation.metrics.tokens import WORDS
from vlm.tasks.shared.rewards import (
    TEXT_REWARDS,
    FunctionReward,
    SampledTexts,
    Target,
    TextReward,
    WeightedReward,
    list_targets,
    read_weights,
    try_functions,
)

NUMBERS = itertools.count()  # modules have names of their own, because Python imports each once


def score(reward: Any, texts: list[list[str]], references: list[list[str]]) -> Floats:
    return reward(SampledTexts([f"r{at}" for at in range(len(texts))], [Target("?", r) for r in references], texts))


def captions(rng: random.Random, count: int, words: str) -> list[str]:
    return [" ".join(rng.choices(words.split(), k=rng.randint(1, 9))) for _ in range(count)]


RNG = random.Random(0)
CORPUS = [captions(RNG, 5, "a red blue dog runs on the grass") for _ in range(60)]
DRAWN, KNOWN = [captions(RNG, 3, "a red green dog sleeps on the grass") for _ in range(4)], CORPUS[7:11]


def test_rewards_are_the_scores_beside_the_whole_corpus() -> None:
    found = score(TextReward({"cider": 1.0, "bleu4": 0.5}, CORPUS), DRAWN, KNOWN)
    whole = DocumentFrequencies.from_references([[WORDS.cut(text) for text in texts] for texts in CORPUS])
    names = ["a", "b", "c", "d"]
    prepared = References(dict(zip(names, KNOWN, strict=True)), whole)
    for column in range(3):
        scores = prepared.score({name: texts[column] for name, texts in zip(names, DRAWN, strict=True)}).per_image
        asked = [scores[name]["cider"] + 0.5 * scores[name]["bleu4"] for name in names]
        np.testing.assert_allclose(found[:, column], asked, rtol=1e-12)


def test_a_reward_does_not_depend_on_the_batch() -> None:
    corpus = [["a dog runs on the grass", "the dog runs"]] * 20 + [["一只狗在草地上奔跑", "狗在跑"], ["一只猫", "猫"]]
    reward = TextReward({"cider": 1.0, "cider_constant": -0.5}, corpus)
    drawn, references = [["the dog runs", "a cat"], ["狗在跑", "一只狗 在草地上奔跑"]], [corpus[0], corpus[20]]
    together = score(reward, drawn, references)
    alone = [score(reward, [one], [known])[0] for one, known in zip(drawn, references, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def test_what_any_image_would_earn_is_taken_away() -> None:
    plain = TextReward({"cider": 1.0}, CORPUS)
    beside_all = np.stack([score(plain, DRAWN, [texts] * 4) for texts in CORPUS]).mean(0)
    asked = score(plain, DRAWN, KNOWN) - 0.5 * beside_all
    reward = TextReward({"cider": 1.0, "cider_constant": -0.5}, CORPUS)
    np.testing.assert_allclose(score(reward, DRAWN, KNOWN), asked, rtol=1e-12)


def test_exact_texts_and_lengths_are_rewarded_by_words() -> None:
    references = [["a red dog", "one dog runs on grass"], ["yes"]]
    texts = [["a red  dog", "a red dog runs", "A red, dog!"], ["yes", "", "yes yes"]]
    exact = score(TextReward({"exact_match": 2.0}, ()), texts, references)
    np.testing.assert_array_equal(exact, [[2, 0, 0], [2, 0, 0]])
    lengths = score(TextReward({"length": 1.0}, references), texts, references)
    np.testing.assert_allclose(lengths, [[1, 0.8, 1], [1, 0, 0.5]])
    both = score(TextReward({"length": 1.0, "exact_match": 2.0}, references), texts, references)
    np.testing.assert_allclose(both, exact + lengths)
    cider = TextReward({"cider": 0.5, "length": 1.0}, references)
    plain = score(TextReward({"cider": 0.5}, references), texts, references)
    np.testing.assert_allclose(score(cider, texts, references), plain + lengths)


def test_every_right_answer_of_a_question_is_a_reference() -> None:
    questions = [Question("what?", "a cat", answers=("a cat", "cat")), Question("red?", "yes")]
    assert list_targets(questions) == [Target("what?", ["a cat", "cat"]), Target("red?", ["yes"])]
    assert list_targets(["a dog", "one dog"]) == [Target("", ["a dog", "one dog"])]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], FunctionReward]:
    """Builds the reward of a function with this body, in a package that is trusted."""

    def build(body: str, signature: str = "texts, references, prompts, ids") -> FunctionReward:
        name = f"user_rewards_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(f"def score({signature}):\n    {body}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        monkeypatch.setattr(target, "_allowed", [*target.PACKAGES, name])
        return FunctionReward(f"{name}.score")

    return build


TEXTS = [["a", "bb"], ["ccc", "dddd"]]
RIGHT = [["x"], ["y", "z"]]


def test_a_function_of_the_user_gets_texts_references_prompts_and_ids(module) -> None:
    body = "return [len(t) + 10 * len(r) + 100 * (p == '?') + 1000 * int(i[1:]) for t, r, p, i in zip("
    reward = module(f"{body}texts, references, prompts, ids)]")
    assert score(reward, TEXTS, RIGHT).tolist() == [[111, 112], [1123, 1124]]
    weighted = WeightedReward(TextReward({"exact_match": 1.0}, ()), [(reward, 0.5), (module("return [1] * 4"), 2.0)])
    np.testing.assert_allclose(score(weighted, TEXTS, RIGHT), [[57.5, 58], [563.5, 564]])
    assert score(module("import torch; return torch.arange(4)"), TEXTS, RIGHT).tolist() == [[0, 1], [2, 3]]
    assert score(module("return [1.0] * len(texts)", "texts, **others"), TEXTS, RIGHT).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return [1 / (len(t) - 3) for t in texts]", "row r1, text 'ccc': raised ZeroDivisionError: division by zero"),
        ("return [1, 2, float('nan'), 4]", "row r1, text 'ccc': returned nan; return a finite number"),
        ("return [1, float('inf'), 3, 4]", "row r0, text 'bb': returned inf; return a finite number"),
        ("return [1, 2, 3]", "row r0, text 'a': returned 3 numbers for 4 texts; return one per text"),
        ("return 1", "row r0, text 'a': returned int, not one number per text; return a list of numbers"),
        ("return ['good'] * 4", "returned list, not one number per text; return a list of numbers"),
        ("assert len(texts) < 4; return [0] * len(texts)", "raised AssertionError for a batch of 4 texts"),
    ],
)
def test_errors_of_a_user_s_function_name_it_and_the_row(module, body: str, named: str) -> None:
    reward = module(body)
    with pytest.raises(UserError) as caught:
        score(reward, TEXTS, RIGHT)
    assert str(caught.value).startswith(f"task.reward: {reward.name}, row r") and named in str(caught.value)


def test_a_function_must_be_trusted_and_take_the_arguments(module) -> None:
    with pytest.raises(UserError, match=r"task.reward: os.getenv is in a package that is not trusted; .*trust=os"):
        FunctionReward("os.getenv")
    with pytest.raises(UserError, match=r"cannot be called with texts, references, prompts, ids .*'prompts'"):
        module("return [0]", "texts, references")
    good = module("return [0]")
    with pytest.raises(UserError, match=rf"task.reward: there is no {good.name[:-1]}; did you mean {good.name}"):
        FunctionReward(good.name[:-1])


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            "spice",
            "spice: unknown; use bleu1, bleu2, bleu3, bleu4, rouge_l, cider, cider_constant, exact_match, length, ",
        ),
        ({"cider": 1.0, "cidr": 1.0}, "cidr: unknown; use .*did you mean cider"),
        ({"likelihood": 1.0}, "names no reward; use bleu1"),
        ({}, "names no reward"),
    ],
)
def test_unknown_rewards_are_named(reward: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"task.reward: {message}"):
        read_weights(reward, TEXT_REWARDS)
    assert read_weights("my.own", TEXT_REWARDS) == {"my.own": 1.0}


def test_a_function_is_tried_on_references_before_training(module) -> None:
    records = [Record(f"{at}", {"captions": [f"caption {at}"], "references": [f"caption {at}"]}) for at in range(90)]

    def keep(record: Record, epoch: int) -> Record:
        return record

    field = CaptionField(tokenizer=ByteTokenizer(), max_len=30)
    reward = module("return [float(not t.endswith('63')) or 1 / 0 for t in texts]")
    with pytest.raises(UserError, match="row 63, text 'caption 63': raised ZeroDivisionError"):
        try_functions({reward.name: 1.0}, field, ListSplit(records, keep))
    try_functions({reward.name: 1.0}, field, ListSplit(records[:63], keep))
    try_functions({reward.name: 1.0}, field, ListSplit(records[64:], keep))
    try_functions({"cider": 1.0}, field, ListSplit(records, keep))
