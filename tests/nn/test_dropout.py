"""Dropout drops what it should, as often as it should, and its gradient knows what it dropped."""

import math

import pytest
import torch

from vlm.nn.attention import attention
from vlm.nn.dropout import Dropout, dropout

COUNT = 400_000


@pytest.mark.parametrize("rate", [0.1, 0.37, 0.9])
def test_as_many_are_dropped_as_the_rate_says(rate):
    torch.manual_seed(0)
    out = dropout(torch.ones(COUNT), rate)
    dropped = (out == 0).float()
    bound = 4 * math.sqrt(rate * (1 - rate) / COUNT)
    assert dropped.mean().item() == pytest.approx(rate, abs=bound)
    assert out.mean().item() == pytest.approx(1, abs=bound / (1 - rate))
    # Four elements come of one draw: each must be dropped as often, and none together with its neighbours.
    for part in dropped.view(-1, 4).T:
        assert part.mean().item() == pytest.approx(rate, abs=2 * bound)
    pairs = dropped.view(-1, 4)
    assert torch.corrcoef(pairs.T).fill_diagonal_(0).abs().max() < 0.015


def test_the_gradient_passes_where_elements_did():
    x = torch.randn(7, 5, requires_grad=True)
    out = dropout(x, 0.5)
    out.sum().backward()
    assert torch.equal(x.grad == 0, out == 0)
    torch.testing.assert_close(x.grad[out != 0], torch.full_like(x.grad[out != 0], 2.0))


def test_what_is_dropped_follows_the_seed():
    x, found = torch.randn(50), []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(dropout(x, 0.3))
    assert torch.equal(*found)
    assert not torch.equal(found[0], dropout(x, 0.3))


def test_nothing_is_dropped_in_evaluation_or_at_rate_0():
    x = torch.randn(9)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert not dropout(x, 1.0).any()


@pytest.mark.slow
def test_attention_with_dropout_is_attention_in_expectation():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)  # grouped heads
    draws = torch.stack([attention(q, k, v, dropout=0.2) for _ in range(3000)])
    spread = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - attention(q, k, v)).abs() < 5 * spread).all()
