"""Losses by window: the paired interval beside one that is computed from every drawn window, and token frequencies."""

import math

import numpy as np
import pytest
import torch

from vlm.data.batch import IGNORE, Targets
from vlm.evaluation.metrics.bootstrap import compute_differences, resamples
from vlm.tasks.language_modeling.train import WindowLosses, WindowMetric, unigram_losses

WINDOWS = [WindowLosses(3, 2.0, 6.5), WindowLosses(5, 9.0, 8.0), WindowLosses(1, 0.25, 2.0), WindowLosses(4, 3.0, 5.0)]


def metric(windows=WINDOWS):
    made = WindowMetric()
    made.update([f"test-{at}" for at in range(len(windows))], windows)
    return made


def test_the_interval_is_that_of_every_resample_written_out():
    made = metric()
    assert made.compute() == pytest.approx({"model": 14.25 / 13, "unigram": 21.5 / 13})
    gains, scores = [], []
    for block in resamples(4, 7):
        for counts in block.astype(int):
            drawn = [window for window, times in zip(WINDOWS, counts, strict=True) for _ in range(times)]
            tokens = sum(window.tokens for window in drawn)
            scores.append(2 * sum(window.model for window in drawn) / tokens)
            gains.append(scores[-1] - 2 * sum(window.unigram for window in drawn) / tokens)
    model, unigram, samples = made.scorers(2.0)
    (difference,) = compute_differences(unigram, model, samples, seed=7)
    assert difference.value == pytest.approx(2 * (14.25 - 21.5) / 13)
    assert [difference.low, difference.high] == pytest.approx(np.quantile(gains, [0.025, 0.975]).tolist())
    bounds = made.intervals("bits_per_byte", 2.0, seed=7)
    low, high = np.quantile(scores, [0.025, 0.975])
    assert bounds == pytest.approx({"bits_per_byte@low": low, "bits_per_byte@high": high})


def test_without_the_training_text_there_is_no_baseline():
    made = metric([window._replace(unigram=None) for window in WINDOWS])
    assert made.compute() == pytest.approx({"model": 14.25 / 13}) and made.scorers(1.0) is None


@pytest.mark.parametrize("labels", [[[1, 2, IGNORE], [IGNORE, 0, 1]], [[1, 2, 0], [2, 0, 1]]])
def test_token_frequencies_lose_only_scored_tokens_of_each_row(labels):
    chances = [0.5, 0.25, 0.25]
    found = unigram_losses(torch.zeros(2, 3), Targets.from_labels(torch.tensor(labels)), np.log(chances))
    expected = [-sum(math.log(chances[label]) for label in row if label != IGNORE) for row in labels]
    assert found == pytest.approx(expected)
