"""The loss of language modelling, and losses by window: the paired interval, and token frequencies."""

import math
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vlm.data.batch import IGNORE, Batch, Targets, TextRows
from vlm.evaluation.metrics.bootstrap import compute_differences, resamples
from vlm.models.recurrent import RecurrentDecoder
from vlm.tasks.language_modeling.train import LanguageModeling, WindowLosses, WindowMetric, unigram_losses

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


def test_z_loss_is_palms():
    """1e-2 times the square of log Z of each prediction is added, in training alone."""
    torch.manual_seed(0)
    model = RecurrentDecoder(vocab_size=9, max_len=8, dim=6)
    tokens = torch.randint(9, (2, 6))
    batch = Batch([], {"text": TextRows(tokens, None, Targets.from_labels(tokens[:, 1:]))}, [])
    task, plain = (LanguageModeling(model=model, fields={}, seed=0, z_loss=z) for z in (0.01, 0.0))
    logits = model.head(model(tokens[:, :-1])).double()
    added = 0.01 * logits.exp().sum(-1).log().square().sum()
    (term,), (without,) = task.loss(batch).values(), plain.loss(batch).values()
    assert term.total.item() == pytest.approx((without.total + added).item(), rel=1e-6) and term.count == 10
    assert task.token_loss(batch["text"])[0].item() == without.total.item()


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("nd he went.\nA large dog ran", "A large"),  # a split that begins inside a word
        ("nd he went home", "he went"),
        ("word", "word"),
    ],
)
def test_the_prompt_to_try_begins_with_a_word(text: str, prompt: str) -> None:
    tokens = SimpleNamespace(tokens=torch.tensor([*text.encode()]))
    ours = SimpleNamespace(
        tokenizer=SimpleNamespace(decode=lambda ids: bytes(ids).decode()),
        text=SimpleNamespace(tokens=lambda split: tokens),
    )
    example = LanguageModeling.example(ours, SimpleNamespace(final_split="test"), Path())  # type: ignore[arg-type]
    assert shlex.split(example) == ["vlm", "generate", "--prompt", prompt]
