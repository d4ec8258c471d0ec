"""The filters against brute force, and the draws against the distribution."""

import numpy as np
import pytest
import torch

from vlm.decoding.sampling import Sampling
from vlm.errors import UserError

LOGITS = torch.tensor([[2.0, 1.0, 0.5, -1.0, -3.0], [0.0, 0.1, 4.0, -2.0, 3.9]], dtype=torch.float64)


def brute_force(logits, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """One row at a time, one token after another, as the papers say it."""
    rows = []
    for row in logits.tolist():
        weights = np.exp(np.array(row) / temperature)
        probs = dict(enumerate(weights / weights.sum()))

        def renormalise(kept):
            total = sum(kept.values())
            return {token: p / total for token, p in kept.items()}

        by_size = sorted(probs, key=lambda token, probs=probs: -probs[token])
        if top_k is not None:
            probs = renormalise({token: probs[token] for token in by_size[:top_k]})
        if top_p is not None:
            kept, total = {}, 0.0
            for token in by_size:
                if token in probs and total < top_p:
                    kept[token] = probs[token]
                    total += probs[token]
            probs = renormalise(kept)
        if min_p is not None:
            most = max(probs.values())
            probs = renormalise({token: p for token, p in probs.items() if p >= min_p * most})
        rows.append([probs.get(token, 0.0) for token in range(len(row))])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0, "top_k": 2},
        {"top_k": 1},
        {"top_k": 99},
        {"top_p": 0.6},
        {"top_p": 1e-9},
        {"top_p": 1.0},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_probabilities_equal_brute_force(options):
    torch.testing.assert_close(
        Sampling(**options).probabilities(LOGITS), brute_force(LOGITS, **options), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": -1}, {"min_p": 0}, {"min_p": 0.0, "top_p": 1}])
def test_filters_that_keep_all_tokens_change_nothing(options):
    assert Sampling(**options).probabilities(LOGITS).equal(Sampling().probabilities(LOGITS))


@pytest.mark.parametrize(("name", "value"), [("top_p", 0), ("top_p", 1), ("min_p", 0), ("min_p", 1), ("top_k", 1)])
def test_the_ends_of_a_range_are_those_of_transformers(name, value):
    transformers = pytest.importorskip("transformers")
    filters = {"top_p": "TopPLogitsWarper", "min_p": "MinPLogitsWarper", "top_k": "TopKLogitsWarper"}
    truth = getattr(transformers, filters[name])(float(value) if name != "top_k" else value)(None, LOGITS).softmax(-1)
    torch.testing.assert_close(Sampling(**{name: value}).probabilities(LOGITS), truth, rtol=0, atol=1e-12)


def test_temperature_zero_takes_the_most_probable():
    assert Sampling(temperature=0).probabilities(LOGITS).argmax(-1).tolist() == [0, 2]
    assert Sampling(temperature=0).draw(LOGITS, torch.tensor([0.0, 1 - 1e-12], dtype=torch.float64)).tolist() == [0, 2]


def test_a_tiny_temperature_stays_finite():
    assert Sampling(temperature=1e-6).probabilities(1e4 * LOGITS.float()).isfinite().all()


def test_draws_have_the_frequencies_of_the_distribution():
    sampling = Sampling(temperature=1.3, top_k=4, min_p=0.05)
    count = 100_000
    uniform = torch.from_numpy(np.random.default_rng(0).random(count))
    drawn = sampling.draw(LOGITS[:1].expand(count, -1), uniform)
    expected = sampling.probabilities(LOGITS[:1])[0] * count
    seen = torch.bincount(drawn, minlength=5).double()
    assert seen[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((seen - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < 16.3  # 3 degrees of freedom: beyond it lies one chance in a thousand


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_no_draw_falls_on_a_token_without_probability(uniform):
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]])
    assert Sampling().draw(logits, torch.tensor([uniform], dtype=torch.float64)).item() in (1, 3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -1}, "--temperature"),
        ({"temperature": 10**400}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"top_k": -2}, "--top-k"),
        ({"top_p": -0.1}, "--top-p"),
        ({"min_p": -0.1}, "--min-p"),
        ({"min_p": 1.5}, "--min-p"),
    ],
)
def test_impossible_values_are_refused(options, named):
    with pytest.raises(UserError, match=named):
        Sampling(**options)
