"""The contrastive loss by hand, and in 16 bits."""

import pytest
import torch
import torch.nn.functional as F

from vlm.tasks.contrastive.loss import contrastive_loss


@pytest.fixture
def pairs():
    return [F.normalize(torch.randn(5, 7), dim=1) for _ in range(2)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_each_side_picks_its_half(pairs, smoothing):
    left, right = pairs
    total, count = contrastive_loss(left, right, torch.tensor([9.0]), label_smoothing=smoothing)
    expected = 0.0
    for one, other in ((left, right), (right, left)):
        for place, row in enumerate(one):
            chances = torch.stack([9 * row @ candidate for candidate in other]).log_softmax(0)
            expected -= (1 - smoothing) * chances[place] + smoothing * chances.mean()
    assert count == 5 and total.item() == pytest.approx(expected.item() / 2, rel=1e-5)


def test_products_are_taken_in_32_bits(pairs):
    scale = torch.tensor([100.0])
    truth, _ = contrastive_loss(*pairs, scale)
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = contrastive_loss(*pairs, scale)
    assert total.dtype == torch.float32 and total.item() == truth.item()
