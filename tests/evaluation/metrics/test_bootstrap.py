"""Bootstrap from sums agrees with scoring resampled captions anew, and its intervals hold what they should."""

import numpy as np
import pytest

from vlm.evaluation.metrics import bootstrap
from vlm.evaluation.metrics.bootstrap import caption_scorer, compute_differences, mean_scorer
from vlm.evaluation.metrics.coco import KEYS, References

WORDS = ["a", "the", "dog", "cat", "runs", "sleeps", "on", "in", "grass", "sofa"]


def make_texts(count: int, seed: int = 0) -> tuple[dict[str, str], dict[str, list[str]]]:
    draw = np.random.default_rng(seed)
    text = lambda: " ".join(draw.choice(WORDS, draw.integers(3, 9)))  # noqa: E731
    references = {f"{n:03d}": [text() for _ in range(3)] for n in range(count)}
    return {image: texts[0] if draw.random() < 0.3 else text() for image, texts in references.items()}, references


def test_a_resample_scores_as_its_captions_do() -> None:
    predictions, references = make_texts(25)
    scores = References(references).score(predictions)
    score = caption_scorer(scores)
    assert score(np.ones((1, 25)))[0] == pytest.approx(list(scores.summary().values()), abs=1e-12)
    draws = next(bootstrap.resamples(25, seed=1))[:5]
    for row, found in zip(draws, score(draws), strict=True):
        taken = [image for image, times in zip(references, row.astype(int), strict=True) for _ in range(times)]
        names = {f"{n:03d}": image for n, image in enumerate(taken)}
        again = References({name: references[image] for name, image in names.items()})
        resampled = again.score({name: predictions[image] for name, image in names.items()}).summary()
        assert found[:5] == pytest.approx(list(resampled.values())[:5], abs=1e-12)
        # CIDEr keeps the document frequencies of the whole.
        assert found[5] == pytest.approx(np.mean([scores.per_image[image]["cider"] for image in taken]))


def test_the_interval_of_a_mean_is_the_known_one() -> None:
    values = np.random.default_rng(0).normal(3, 2, 400)
    found = bootstrap.intervals(["x"], mean_scorer(values[:, None]), 400, seed=0)
    half = 1.96 * values.std() / 20
    assert found == pytest.approx({"x@low": values.mean() - half, "x@high": values.mean() + half}, abs=0.03)


def test_intervals_hold_the_score_and_do_not_change() -> None:
    predictions, references = make_texts(60)
    scores = References(references).score(predictions)
    found = bootstrap.intervals(KEYS, caption_scorer(scores), 60, seed=0)
    assert found.keys() == {f"{name}@{end}" for name in KEYS for end in ("low", "high")}
    assert all(found[f"{name}@low"] <= value <= found[f"{name}@high"] for name, value in scores.summary().items())
    assert bootstrap.intervals(KEYS, caption_scorer(scores), 60, seed=0) == found


def test_paired_differences() -> None:
    draw = np.random.default_rng(0)
    one = draw.normal(0, 1, (300, 1))
    better, same = one + 0.2 + draw.normal(0, 0.5, (300, 1)), one[::-1]
    (found,) = bootstrap.compute_differences(mean_scorer(one), mean_scorer(better), 300, seed=0)
    assert found.value == pytest.approx(float((better - one).mean())) and found.low > 0 and found.p < 0.01
    (found,) = bootstrap.compute_differences(mean_scorer(one), mean_scorer(same), 300, seed=0)
    assert found.low < 0 < found.high and found.p > 0.3
    (found,) = bootstrap.compute_differences(mean_scorer(one), mean_scorer(one), 300, seed=0)
    assert found == (0, 0, 0, 1)


def test_sums_in_another_order_are_no_difference():
    values = np.random.default_rng(0).random((50, 1))
    (gap,) = compute_differences(mean_scorer(values), lambda draws: (draws[:, ::-1] @ values[::-1]) / 50, 50, seed=0)
    assert (gap.low, gap.high, gap.p) == (0, 0, 1)
