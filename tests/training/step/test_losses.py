"""The one shift of labels, and the loss over only the labelled positions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLMPredictionHead

from vlm.data.batch import IGNORE, Targets, next_token_labels, pack
from vlm.errors import UserError
from vlm.models.heads import VocabularyHead
from vlm.nn import vocabulary_loss
from vlm.nn.vocabulary_loss import Head
from vlm.training.step.losses import Term, row_losses, token_loss
from vlm.training.step.task import EvaluationState

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


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_equals_that_of_all_logits(label_smoothing):
    tokens, segments = pack(ROWS, pad_id=0)
    labels = next_token_labels(tokens, segments)
    hidden = torch.randn(*tokens.shape, 6, requires_grad=True)
    head = nn.Linear(6, V, bias=False)
    total, count = token_loss(hidden, Targets.from_labels(labels), Head(head.weight), label_smoothing=label_smoothing)
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
    token_loss(
        torch.randn(*tokens.shape, 6), Targets.from_labels(next_token_labels(tokens, segments)), Head(torch.randn(V, 6))
    )
    assert seen == [(8, 6)]


@pytest.mark.parametrize("options", [{"tied": False}, {"bias": True}, {"tied": False, "bias": True}], ids=str)
@pytest.mark.parametrize("transform", [None, "gelu"])
def test_heads_of_all_kinds_go_through_the_loss_in_parts(scramble, monkeypatch, options, transform):
    """Against the logits of all positions at once, with the gradients of every parameter."""
    monkeypatch.setitem(vocabulary_loss.MOST, "cpu", 2 * V)  # two positions at a time
    tokens, segments = pack(ROWS, pad_id=0)
    targets = Targets.from_labels(next_token_labels(tokens, segments))
    layers = scramble(VocabularyHead(dim=6, vocab_size=V, transform=transform, **options))
    inputs = [torch.randn(*tokens.shape, 6, requires_grad=True), torch.randn(V, 6, requires_grad=True)]
    asked = [*inputs, *layers.parameters()]

    def gradients(loss):
        return torch.autograd.grad(loss, asked, allow_unused=True)

    head = layers.parts(inputs[1])
    total, _ = token_loss(inputs[0], targets, head)
    truth = F.cross_entropy(head.logits(targets.pick(inputs[0])), targets.labels, reduction="sum")
    torch.testing.assert_close(total, truth)
    for mine, theirs in zip(gradients(total), gradients(truth), strict=True):
        assert (mine is None) == (theirs is None)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(row_losses(inputs[0], targets, head)[0].sum(), truth)


def test_a_head_like_berts(scramble):
    """Transform, embedding and bias, as in BertLMPredictionHead."""
    config = BertConfig(vocab_size=V, hidden_size=6, num_attention_heads=2, num_hidden_layers=1)
    theirs = scramble(BertLMPredictionHead(config))
    ours = VocabularyHead(dim=6, vocab_size=V, bias=True, transform="gelu", norm_eps=config.layer_norm_eps)
    state = {name.removeprefix("transform."): tensor for name, tensor in theirs.state_dict().items()}
    state = {name.replace("LayerNorm", "norm"): tensor for name, tensor in state.items() if "decoder" not in name}
    ours.load_state_dict(state | {"bias": theirs.decoder.bias})
    hidden = torch.randn(5, 6)
    torch.testing.assert_close(ours.parts(theirs.decoder.weight).logits(hidden), theirs(hidden), rtol=0, atol=1e-5)


def test_an_evaluation_of_which_nothing_was_read_is_refused() -> None:
    evaluation = EvaluationState("val")
    evaluation.unreadable = ["a.png: is cut short"]
    with pytest.raises(UserError, match=r"none of the samples can be read: a.png: is cut short"):
        evaluation.losses()
    evaluation.add_loss({"tokens": Term(torch.tensor(6.0), 3)})
    assert evaluation.losses() == {"loss": 2.0}
