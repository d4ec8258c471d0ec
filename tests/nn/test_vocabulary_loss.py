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


def check(count, smoothing, biased, z_loss=0.0):
    """Compares loss and gradients of so many tokens with those of one product in double precision."""
    torch.manual_seed(count)
    hidden, weight = (torch.randn(n, D, dtype=torch.float64) for n in (count, V))
    parts = [hidden, weight, torch.randn(V, dtype=torch.float64)] if biased else [hidden, weight]
    labels = torch.randint(V, (count,))
    truth_of = [part.clone().requires_grad_() for part in parts]
    logits = F.linear(*truth_of)
    truth = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    truth = truth + z_loss * (logits.exp().sum(1).log() ** 2).sum()
    (truth * 0.3).backward()
    mine_of = [part.float().requires_grad_() for part in parts]
    mine = vocabulary_loss(mine_of[0], labels, *mine_of[1:], label_smoothing=smoothing, z_loss=z_loss)
    (mine * 0.3).backward()
    assert mine.item() == pytest.approx(truth.item(), rel=1e-6)
    for own, other in zip(mine_of, truth_of, strict=True):
        torch.testing.assert_close(own.grad, other.grad.float(), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        again = vocabulary_loss(mine_of[0], labels, *mine_of[1:], label_smoothing=smoothing, z_loss=z_loss)
    assert again.item() == mine.item()
    each = token_losses(mine_of[0], labels, *mine_of[1:])
    torch.testing.assert_close(each, F.cross_entropy(logits, labels, reduction="none").float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("count", [1, 7, 20])
def test_loss_and_gradients_are_those_of_one_product(few, count, smoothing, z_loss, biased):
    check(count, smoothing, biased, z_loss)


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_only_trained_parts_get_a_gradient(few, trained):
    torch.manual_seed(0)
    parts = {"hidden": torch.randn(7, D), "weight": torch.randn(V, D), "bias": torch.randn(V)}
    labels, part = torch.randint(V, (7,)), parts[trained].requires_grad_()
    F.cross_entropy(F.linear(*parts.values()), labels, reduction="sum").backward()
    truth, part.grad = part.grad, None
    loss = vocabulary_loss(parts["hidden"], labels, parts["weight"], parts["bias"])
    if loss.grad_fn.name() == "_ChunkedLossBackward":
        kept = [tensor for tensor in loss.grad_fn.saved_tensors if tensor is not None]
        assert [tensor.shape for tensor in kept] == [part.shape]  # none for frozen parts, which may be large
    loss.backward()
    torch.testing.assert_close(part.grad, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.01)])
def test_columns_that_fill_up_a_gpus_blocks_change_nothing(few, smoothing, z_loss, biased, monkeypatch):
    seen = []
    linear = F.linear
    monkeypatch.setattr(vocabulary, "MULTIPLE", {"cpu": 8})
    monkeypatch.setattr(F, "linear", lambda x, w, b: seen.append(len(w)) or linear(x, w, b))
    vocabulary_loss(torch.randn(20, D, requires_grad=True), torch.zeros(20).long(), torch.randn(V, D))
    assert set(seen) == {16}  # 11 words and 5 more columns
    monkeypatch.setattr(F, "linear", linear)
    check(20, smoothing, biased, z_loss)


@pytest.mark.slow
def test_the_body_of_a_part_can_be_traced(few, monkeypatch):
    monkeypatch.setattr(vocabulary, "MULTIPLE", {"cpu": 8})
    traced = torch.compile(vocabulary._chunk_loss, backend="aot_eager", fullgraph=True)
    monkeypatch.setitem(vocabulary._chunk_loss_by_device, "cpu", traced)
    check(20, 0.1, biased=True, z_loss=0.01)


def test_no_token_at_all(few):
    hidden, weight = torch.randn(0, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    vocabulary_loss(hidden, torch.zeros(0).long(), weight).backward()
    assert torch.equal(weight.grad, torch.zeros(V, D))


def test_no_logits_of_all_tokens_are_made(few, monkeypatch):
    seen = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: seen.append(len(x)) or linear(x, *rest))
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
