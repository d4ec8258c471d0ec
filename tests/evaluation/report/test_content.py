"""The verdict on a model: the best control, the interval of the difference, and remedies that fit."""

import numpy as np
import pytest

from vlm.evaluation.metrics.bootstrap import Difference, compute_differences, mean_scorer
from vlm.evaluation.report.content import TrainedModel, choose_metric, make_verdict
from vlm.evaluation.report.evaluation import render_scores

SCORES = {"loss": 1.0, "cider": 0.150, "cider@constant": 0.210, "cider@shuffled": 0.1, "cider@low": 0.1}
SCRATCH, TUNED = TrainedModel(5000), TrainedModel(5000, is_pretrained=True)


def verdict(
    results, *, name="cider", difference=None, trained=SCRATCH, bounds=None, remedies=None, count=40, **options
):
    metric = choose_metric(results, [name], **options)
    gap = None if difference is None else Difference(*difference, p=0.01)
    where = "40 samples of test (300 of train)"
    return make_verdict(
        metric, paired=gap, bounds=bounds, samples=where, count=count, trained=trained, remedies=remedies
    )


def test_the_best_control_is_named_with_both_scores_the_paired_interval_samples_and_steps():
    found = verdict(SCORES, difference=(-0.06, -0.09, -0.03))
    assert found.sentence == (
        "worse than the best constant answer: CIDEr 0.1500 against 0.2100, a difference of -0.0600 (95% paired "
        "interval -0.0900 to -0.0300), on 40 samples of test (300 of train), after 5,000 steps"
    )
    assert found.remedies[0].startswith("train longer")
    first, second = found.lines()
    assert first.startswith("verdict     worse than") and second.startswith("            to try next: train longer")


@pytest.mark.parametrize(
    ("ends", "words"),
    [((0.01, 0.2), "better than"), ((-0.2, -0.01), "worse than"), ((-0.1, 0.1), "not clearly better or worse than")],
)
def test_an_interval_with_0_is_no_difference(ends, words):
    better = SCORES | {"cider": 0.21 + sum(ends) / 2}
    assert verdict(better, difference=(sum(ends) / 2, *ends)).sentence.startswith(f"{words} the best constant answer: ")


def test_without_pairs_the_interval_is_that_of_the_models_score():
    found = verdict(SCORES | {"cider": 0.3}, bounds=(0.25, 0.35))
    assert "(95% interval of the model's score +0.0400 to +0.140)" in found.sentence
    assert "interval" not in verdict(SCORES).sentence and verdict(SCORES).sentence.startswith("worse than")
    assert verdict(SCORES | {"cider": 0.21}).sentence.startswith("no better than")


def test_scores_that_differ_by_rounding_only_are_equal():
    """1/12 and the mean of 12 chances of 1/12 were "worse than chance ... a difference of -4.16e-17"."""
    found = verdict(SCORES | {"cider": 0.21 - 4e-17, "cider@constant": 0.21 + 4e-17})
    assert found.sentence.startswith("no better than") and "a difference of 0, on" in found.sentence
    assert "(95% paired interval 0 to +0.100)" in verdict(SCORES, difference=(0.05, -1e-17, 0.1)).sentence


def test_a_pretrained_model_is_not_told_to_use_one():
    for results in (SCORES, SCORES | {"cider": 0.3}):
        assert any("model=pretrained" in remedy for remedy in verdict(results).remedies)
        assert not any("pretrained" in remedy for remedy in verdict(results, trained=TUNED).remedies)
    assert verdict(SCORES | {"cider": 0.3}, trained=TrainedModel(99)).remedies == ("train longer (trainer.max_epochs)",)
    seen = verdict(SCORES | {"cider": 0.3}, trained=TrainedModel(99, is_on_training_data=True)).sentence
    assert seen.endswith(", which the model was trained on, after 99 steps")
    found = TrainedModel(None, is_pretrained=True)
    assert "fine-tune it" in verdict(SCORES, trained=found).remedies[0]
    assert verdict(SCORES | {"cider": 0.3}, trained=found).remedies == ()


def test_few_samples_are_no_ground_for_a_comparison():
    found = verdict(SCORES, bounds=(0.15, 0.15), count=1)
    assert found.sentence.startswith("too few samples to compare the model with the best constant answer: CIDEr 0.1500")
    assert found.remedies == ("evaluate at least 10 samples",)


def test_a_model_close_to_its_ceiling_gets_no_advice():
    almost = {"accuracy": 0.9995, "accuracy@constant": 0.4}
    assert verdict(almost, name="accuracy", bounds=(0.999, 0.9999)).remedies == ()
    assert verdict(almost | {"accuracy": 0.9}, name="accuracy", bounds=(0.88, 0.92)).remedies


def test_a_model_at_its_ceiling_gets_no_advice():
    right = {"accuracy": 1.0, "accuracy@constant": 0.4}
    found = verdict(right, name="accuracy")
    assert found.sentence.startswith("as good as the data allow") and not found.remedies and len(found.lines()) == 1
    found = verdict(right | {"accuracy@constant": 1.0}, name="accuracy")
    assert found.sentence.startswith("these data need no model") and not found.remedies
    limited = {"accuracy": 0.485, "accuracy@constant": 0.1, "accuracy@ceiling": 0.491}
    assert verdict(limited, name="accuracy", bounds=(0.47, 0.50)).sentence.startswith("as good as the data allow")
    assert verdict(limited, name="accuracy", bounds=(0.47, 0.48)).sentence.startswith("better than")
    assert verdict({"bleu": 100.0, "bleu@dictionary": 34.0}, name="bleu").remedies == ()


def test_the_tasks_own_remedies_come_first_unless_the_model_is_better():
    assert verdict(SCORES, remedies=["task.scores=[anls,captions]"]).remedies == ("task.scores=[anls,captions]",)
    assert verdict(SCORES | {"cider": 0.3}, remedies=["task.scores=[anls,captions]"]).remedies[0].startswith("a pre")


def test_lower_is_better_of_some_metrics_and_some_controls_need_not_be_beaten():
    bits = {"bits_per_byte": 2.0, "bits_per_byte@unigram": 4.0}
    found = verdict(bits, name="bits_per_byte", smaller=["bits_per_byte"]).sentence
    assert found.startswith(
        "better than the frequencies of tokens: bits per byte 2.0000 against 4.0000 (lower is better)"
    )
    recall = {"recall": 0.5, "recall@bag": 0.6, "recall@chance": 0.1}
    assert verdict(recall, name="recall", ignored=["bag"]).sentence.startswith(
        "better than chance: recall 0.5000 against 0.1000 (the same model with the words of each text shuffled: "
        "0.6000), a difference of +0.400"
    )
    recall["recall@bag"] = 0.05
    assert "shuffled" not in verdict(recall, name="recall", ignored=["bag"]).sentence
    assert verdict({"loss": 1.0}).sentence.startswith("nothing to compare the model with")


def test_the_interval_is_of_the_same_resamples():
    """The difference of systems that differ in one sample of many is known better than either score."""
    right = np.random.default_rng(0).random((200, 1)).round()
    other = right.copy()
    other[:4] = 0
    (gap,) = compute_differences(mean_scorer(other), mean_scorer(right), 200, seed=0)
    assert gap.low >= 0 and gap.high < 0.03 and gap.value == pytest.approx(float((right - other).mean()))


def test_a_ceiling_is_no_control():
    """Neither the verdict nor the report's note on controls takes the best possible score for a baseline."""
    scores = {"loss": 1.4, "loss@ceiling": 1.38, "accuracy": 0.48, "accuracy@ceiling": 0.49}
    assert choose_metric(scores, ["accuracy"]) is None
    section = render_scores(scores)
    assert "<th>ceiling</th>" in section and "best possible score" in section
    assert "should beat" not in section
