"""Classifiers of texts and of words against Hugging Face's, with their weights."""

import pytest
import torch
from bert import copied
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from vlm.models.text_classifiers import SequenceClassifier, TokenClassifier
from vlm.models.text_encoder import TextEncoder
from vlm.nn.attention import recorded

V, MAX_LEN, D = 31, 12, 24
SIZES = {"vocab_size": V, "max_len": MAX_LEN, "dim": D, "depth": 2, "num_heads": 3}
BERT = {"pre_norm": False, "embed_norm": True, "token_types": 2, "norm_eps": 1e-12}
SEEN = torch.arange(MAX_LEN) < torch.tensor([[7], [12]])


def theirs(kind, scramble):
    sizes = {"vocab_size": V, "max_position_embeddings": MAX_LEN, "hidden_size": D, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "intermediate_size": 4 * D, "type_vocab_size": 2, "num_labels": 5}
    return scramble(kind(BertConfig(**sizes)))


@pytest.fixture
def inputs():
    return torch.randint(V, (2, MAX_LEN)), torch.randint(2, (2, MAX_LEN))


def test_equals_bert_for_sequence_classification(scramble, inputs):
    model, (tokens, types) = theirs(BertForSequenceClassification, scramble), inputs
    ours = SequenceClassifier(encoder=TextEncoder(**SIZES, **BERT), num_classes=5, transform=True)
    copied(ours.encoder, model.bert)
    ours.transform.load_state_dict(model.bert.pooler.dense.state_dict())
    ours.head.load_state_dict(model.classifier.state_dict())
    truth = model(tokens, attention_mask=SEEN.long(), token_type_ids=types).logits
    torch.testing.assert_close(ours.eval()(tokens, SEEN.long(), types), truth, rtol=0, atol=1e-5)


def test_equals_bert_for_token_classification(scramble, inputs):
    model, (tokens, types) = theirs(BertForTokenClassification, scramble), inputs
    ours = TokenClassifier(encoder=TextEncoder(**SIZES, **BERT), num_classes=5)
    copied(ours.encoder, model.bert)
    ours.head.load_state_dict(model.classifier.state_dict())
    truth = model(tokens, attention_mask=SEEN.long(), token_type_ids=types).logits
    places = SEEN.flatten().nonzero()[:, 0]
    found = ours.eval()(tokens, SEEN.long(), types, places)
    torch.testing.assert_close(found, truth[SEEN], rtol=0, atol=1e-5)
    assert ours(tokens).shape == (2 * MAX_LEN, 5)  # of all tokens


@pytest.mark.parametrize("pool", ["class", "mean", "attention"])
def test_padding_changes_no_text(scramble, inputs, pool):
    model = scramble(SequenceClassifier(encoder=TextEncoder(**SIZES), num_classes=3, pool=pool, pool_heads=2))
    logits = model(inputs[0], SEEN.long())
    alone = torch.cat([model(inputs[0][:1, :7]), model(inputs[0][1:])])
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_shapes_of_a_sentence_that_is_classified_by_its_first_token(scramble):
    """Of n = 5 tokens, d = 24 and H = 3 heads of d_k = 8: one row of the last states goes through the head, 24 x 4.

    The first token sees all others, which is how it tells of them, and its weights have the sum 1.
    """
    model = scramble(SequenceClassifier(encoder=TextEncoder(**SIZES), num_classes=4))
    tokens = torch.tensor([[1, 5, 6, 7, 2]])
    with recorded(model.encoder.blocks[-1].attn) as [weights]:
        states = model.encoder(tokens).states
    assert states.shape == (1, 5, 24) and model.head.weight.shape == (4, 24)
    assert weights[0].shape == (1, 3, 5, 5) and (weights[0][0, :, 0] > 0).all()
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(1, 3, 5))
    torch.testing.assert_close(model(tokens), states[:, 0] @ model.head.weight.T + model.head.bias)


@torch.no_grad()
def test_the_shapes_of_words_that_are_tagged(scramble):
    """Of "they refuse to permit", each word a token between begin and end: 4 of 6 states, and 3 scores of each."""
    model = scramble(TokenClassifier(encoder=TextEncoder(**SIZES), num_classes=3))
    tokens, places = torch.tensor([[1, 5, 6, 7, 8, 2]]), torch.tensor([1, 2, 3, 4])
    logits = model(tokens, None, None, places)
    assert logits.shape == (4, 3)
    torch.testing.assert_close(logits, model.encoder(tokens).states[0, 1:5] @ model.head.weight.T + model.head.bias)
