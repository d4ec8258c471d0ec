"""The loss taken in parts is that of all logits at once."""

import pytest
import torch
import torch.nn.functional as F

from vlm.nn import vocabulary_loss as vocabulary
from vlm.nn.vocabulary_loss import token_losses, vocabulary_loss

V, D = 11, 6


@pytest.fixture(params=[1, 3 * V, 7 * V])
def few(request, monkeypatch):
    """Makes parts of 1, 3 and 7 tokens."""
    monkeypatch.setattr(vocabulary, "MOST", {"cpu": request.param})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("count", [1, 7, 20])
def test_loss_and_gradients_are_those_of_one_product(few, count, smoothing):
    torch.manual_seed(count)
    hidden, weight = (torch.randn(n, D, dtype=torch.float64) for n in (count, V))
    labels = torch.randint(V, (count,))
    truth_of = [part.clone().requires_grad_() for part in (hidden, weight)]
    logits = F.linear(*truth_of)
    truth = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    (truth * 0.3).backward()
    mine_of = [part.float().requires_grad_() for part in (hidden, weight)]
    mine = vocabulary_loss(mine_of[0], labels, mine_of[1], label_smoothing=smoothing)
    (mine * 0.3).backward()
    assert mine.item() == pytest.approx(truth.item(), rel=1e-6)
    for own, other in zip(mine_of, truth_of, strict=True):
        torch.testing.assert_close(own.grad, other.grad.float(), rtol=1e-5, atol=1e-6)
    each = token_losses(*(part.detach() for part in (mine_of[0], labels, mine_of[1])))
    torch.testing.assert_close(each, F.cross_entropy(logits, labels, reduction="none").float(), rtol=1e-5, atol=1e-6)


def test_no_logits_of_all_tokens_are_made(few, monkeypatch):
    seen = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, weight: seen.append(len(x)) or linear(x, weight))
    vocabulary_loss(torch.randn(20, D, requires_grad=True), torch.zeros(20, dtype=torch.long), torch.randn(V, D))
    assert sum(seen) == 20 and max(seen) <= 7


def test_lower_precision_goes_through(few):
    hidden, weight = torch.randn(9, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    labels = torch.randint(V, (9,))
    truth = F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = vocabulary_loss(hidden, labels, weight)
    mine.backward()
    assert mine.dtype == torch.float32 and mine.item() == pytest.approx(truth.item(), rel=0.02)
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
