"""The one shift of labels, and the loss over only the labelled positions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vlm.data.batch import IGNORE, Targets, next_token_labels, pack
from vlm.training.losses import token_loss

BOS, EOS, V = 1, 2, 11
ROWS = [[[BOS, 5, 6, EOS], [BOS, 7, EOS]], [[BOS, 8, 8, EOS]]]


def test_labels_of_a_row_written_by_hand():
    tokens, segments = pack(ROWS, pad_id=0)
    assert next_token_labels(tokens, segments).tolist() == [
        [5, 6, EOS, IGNORE, 7, EOS, IGNORE],
        [8, 8, EOS, IGNORE, IGNORE, IGNORE, IGNORE],
    ]


def test_the_end_is_learned_where_padding_looks_the_same():
    tokens, segments = pack(ROWS, pad_id=EOS)
    labels = next_token_labels(tokens, segments)
    assert (labels == EOS).sum() == 3
    assert (labels != IGNORE).sum() == sum(len(caption) - 1 for row in ROWS for caption in row)


def test_labels_of_nothing():
    nothing = torch.empty(0, 0, dtype=torch.long)
    assert next_token_labels(nothing, nothing).shape == (0, 0)


def one_hot(tokens):
    return 100.0 * F.one_hot(tokens, V).float()


def test_loss_is_zero_for_logits_that_predict_the_next_token_and_only_then():
    tokens, segments = pack(ROWS, pad_id=0)
    targets = Targets.of(next_token_labels(tokens, segments))
    following, _ = token_loss(one_hot(tokens.roll(-1, 1)), targets, torch.eye(V))
    same, count = token_loss(one_hot(tokens), targets, torch.eye(V))
    after, _ = token_loss(one_hot(tokens.roll(-2, 1)), targets, torch.eye(V))
    assert following == 0
    assert min(same, after) > 50 * count


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_equals_that_of_all_logits(label_smoothing):
    tokens, segments = pack(ROWS, pad_id=0)
    labels = next_token_labels(tokens, segments)
    hidden = torch.randn(*tokens.shape, 6, requires_grad=True)
    head = nn.Linear(6, V, bias=False)
    total, count = token_loss(hidden, Targets.of(labels), head.weight, label_smoothing=label_smoothing)
    logs = head(hidden).double().log_softmax(-1)
    wanted = (1 - label_smoothing) * F.one_hot(labels.clamp(min=0), V) + label_smoothing / V
    truth = -(wanted * logs).sum(-1)[labels != IGNORE].sum()
    assert count == 8
    torch.testing.assert_close(total.double(), truth, rtol=1e-6, atol=0)
    total.backward()
    assert torch.equal(hidden.grad.abs().sum(-1) > 0, labels != IGNORE)


def test_only_labelled_positions_go_through_the_head(monkeypatch):
    tokens, segments = pack(ROWS, pad_id=0)
    seen = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: seen.append(x.shape) or linear(x, *rest))
    token_loss(torch.randn(*tokens.shape, 6), Targets.of(next_token_labels(tokens, segments)), torch.randn(V, 6))
    assert seen == [(8, 6)]
