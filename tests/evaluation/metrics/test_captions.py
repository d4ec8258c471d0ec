"""The caption metrics as a whole: the published scores, and the same digits whatever the order and the processes."""

import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from vlm.data.records import ListSplit, Record
from vlm.errors import UserError
from vlm.evaluation.metrics import tokens
from vlm.evaluation.metrics.captions import CaptionMetric, shuffle_captions
from vlm.evaluation.metrics.coco import References, score_captions
from vlm.tasks.captioning.metrics import caption_controls, compute_novelty

KEYS = {"bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "cider"}
WORDS = ["a", "the", "dog", "cat", "runs", "sleeps", "on", "in", "grass", "sofa", "red", "blue", "two", "small"]


@cache
def make_texts(count: int) -> tuple[dict[str, str], dict[str, list[str]]]:
    draw = random.Random(count)
    captions = lambda: " ".join(draw.choices(WORDS, k=draw.randint(3, 9))).capitalize() + "."  # noqa: E731
    references = {f"image {i}": [captions() for _ in range(draw.randint(1, 5))] for i in range(count)}
    predictions = {image: draw.choice([captions(), draw.choice(texts)]) for image, texts in references.items()}
    return predictions, references


def test_prepared_references_serve_many_candidates() -> None:
    predictions, references = make_texts(30)
    prepared = References(references)
    other = {image: text.lower()[::-1] for image, text in predictions.items()}
    for captions in (predictions, other, predictions):
        assert score_captions(captions, prepared).summary() == score_captions(captions, references).summary()
    assert score_captions(predictions, prepared).summary().keys() == KEYS


def test_captions_without_words() -> None:
    references = {"a": ["", "?!"], "b": ["\U0001f600"]}
    scores = score_captions({"a": "", "b": "..."}, references).summary()
    assert all(np.isfinite(list(scores.values())))
    assert score_captions({"a": "dog", "b": ""}, references).summary()["cider"] == 0


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        ({"a": "x"}, {"a": ["x"], "b": ["y"]}, "b: no predicted caption"),
        ({"a": "x", "c": "z"}, {"a": ["x"]}, "c: no reference"),
        ({"a": "x"}, {"a": []}, "a: no reference caption"),
        ({}, {}, "no image to score"),
    ],
)
def test_what_cannot_be_scored_is_named(predictions: dict, references: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        score_captions(predictions, references)


def update(metric: CaptionMetric, images: list[str], size: int = 7) -> CaptionMetric:
    predictions, references = make_texts(60)
    for start in range(0, len(images), size):
        batch = images[start : start + size]
        metric.update(batch, [predictions[i] for i in batch], [references[i] for i in batch])
    return metric


def test_the_metric_agrees_with_the_function_and_adds_variety() -> None:
    predictions, references = make_texts(60)
    scores = update(CaptionMetric(), list(predictions)).compute()
    assert {key: scores[key] for key in KEYS} == score_captions(predictions, references).summary()
    assert scores.keys() - KEYS == {"exact_match", "distinct", "vocabulary", "mean_length", "length_ratio"}


def test_variety() -> None:
    metric = CaptionMetric()
    predictions = [" a red dog ", "A red  dog", "a red dog", "it's a dog."]
    references = [["a red dog"], ["a red dog", "no"], ["a cat", "a red dog"], ["a dog"]]
    metric.update(["1", "2", "3", "4"], predictions, references)
    scores = metric.compute()
    assert scores["exact_match"] == 2 / 4
    assert scores["distinct"] == 3 / 4
    assert scores["vocabulary"] == len({"a", "red", "dog", "it", "'s"})
    assert scores["mean_length"] == (3 + 3 + 3 + 4) / 4


def test_a_caption_of_training_is_not_new_in_other_letters_or_with_other_stops() -> None:
    known = {"captions": ["A red dog .", "Two cats, asleep."], "references": []}
    train = ListSplit([known], lambda known, epoch: Record("t", known))
    captions = ["a red dog", "two cats asleep", "a dog red", "Two cats!"]
    assert compute_novelty(captions, train, tokens.WORDS) == 0.5
    chinese = {"captions": ["一只 红狗。"], "references": []}
    train = ListSplit([chinese], lambda known, epoch: Record("t", known))
    assert compute_novelty(["一只红狗", "红狗一只"], train, tokens.CHARACTERS) == 0.5


def test_order_batches_and_repeated_images_change_no_digit() -> None:
    images = list(make_texts(60)[0])
    scores = update(CaptionMetric(), images).compute()
    assert update(CaptionMetric(), images[::-1] + images[:13], size=3).compute() == scores
    turned = [dict(reversed(captions.items())) for captions in make_texts(200)]
    assert score_captions(*turned).summary() == score_captions(*make_texts(200)).summary()


def test_odd_texts_survive_the_state() -> None:
    texts = ["caf\u00e9 \u72d7 \U0001f600", "line\nbreak\u2028and \x85 more", "\ud800 half", '"quoted" \\n']
    metric = CaptionMetric()
    metric.update(["\n", "b", "c", "d"], texts, [[text] for text in texts])
    assert metric.compute()["exact_match"] == 1
    assert metric.predictions == dict(zip(["\n", "b", "c", "d"], texts, strict=True))


def test_reset_forgets_and_nothing_cannot_be_scored() -> None:
    """References may change from epoch to epoch."""
    metric = CaptionMetric()
    for reference, exact in (("a dog", 1.0), ("a cat", 0.5)):
        metric.update(["1", "2"], ["a dog", "a fox"], [[reference], ["a fox"]])
        assert metric.compute()["exact_match"] == exact
        metric.reset()
        assert metric.predictions == {}
    with pytest.warns(UserWarning), pytest.raises(UserError, match="no image to score"):
        metric.compute()


def test_controls_are_exact_word_for_word_as_captions_are() -> None:
    train = ListSplit([{"captions": ["a dog"]}], lambda known, epoch: Record("t", known))
    metric = CaptionMetric()
    metric.update(["1", "2"], ["a  dog", "a dog"], [["a  dog"], ["a dog"]])
    assert metric.compute()["exact_match"] == 1
    controls = caption_controls(metric, train, seed=0)
    assert controls["exact_match@constant"] == controls["exact_match@shuffled"] == 1


def gather(metrics: list[CaptionMetric]) -> Callable[[Tensor, object], list[Tensor]]:
    """What every process would receive, without processes."""
    return lambda tensor, group: [torch.cat(list(metric.records)) for metric in metrics]


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
@pytest.mark.parametrize("cut", [0, 1, 23, 60])
def test_processes_with_uneven_shares_agree_with_one(cut: int) -> None:
    images = list(make_texts(60)[0])
    expected = update(CaptionMetric(), images).compute()
    # The second process repeats images of the first, as a sampler that pads does.
    shares = [update(CaptionMetric(), images[:cut]), update(CaptionMetric(), images[cut:] + images[:2])]
    for share in shares:
        share.dist_sync_fn, share.distributed_available_fn = gather(shares), lambda: True
        assert share.compute() == expected


def test_the_best_constant_is_the_best_of_all_tried_in_turn() -> None:
    predictions, references = make_texts(30)
    candidates = [*predictions.values(), "", "Nothing known here"]
    prepared = References(references)
    tried = {text: prepared.score(dict.fromkeys(references, text)).summary()["cider"] for text in candidates}
    assert tried[prepared.best_constant(candidates)] == pytest.approx(max(tried.values()))
    assert prepared.cider_of_constants(candidates) == pytest.approx([tried[text] for text in candidates])


def test_with_one_image_bleu_chooses_the_constant() -> None:
    prepared = References({"a": ["a red dog runs on grass"]})
    assert prepared.best_constant(["a dog", "a red dog runs fast", "red grass"]) == "a red dog runs fast"
    with pytest.raises(UserError, match="no caption to choose"):
        prepared.best_constant([])


@pytest.mark.parametrize("count", [2, 3, 50])
def test_shuffling_gives_every_caption_to_another_image(count: int) -> None:
    predictions = {f"image {i}": f"caption {i}" for i in range(count)}
    mixed = shuffle_captions(predictions, seed=3)
    assert mixed.keys() == predictions.keys()
    assert sorted(mixed.values()) == sorted(predictions.values())
    assert all(mixed[image] != text for image, text in predictions.items())
    assert shuffle_captions(dict(reversed(predictions.items())), seed=3) == mixed
    assert count < 50 or shuffle_captions(predictions, seed=1) != mixed
    assert shuffle_captions({"a": "b"}, seed=0) == {"a": "b"}
