"""The masked language model against Hugging Face's, its likelihoods by hand."""

import pytest
import torch
from bert import copied, head_copied
from transformers import BertConfig, BertForMaskedLM

from vlm.data.batch import InputRows
from vlm.models.masked_language_model import MaskedLanguageModel
from vlm.models.text_encoder import TextEncoder
from vlm.tasks.masked_language_modeling.predict import gap_probabilities, pseudo_log_likelihood

V, MAX_LEN, D, DEPTH, N = 31, 12, 24, 2, 3
BERT = {"pre_norm": False, "embed_norm": True, "token_types": 2, "norm_eps": 1e-12}
MASK = V - 1


def encoder():
    return TextEncoder(vocab_size=V, max_len=MAX_LEN, dim=D, depth=DEPTH, num_heads=N, **BERT)


@pytest.fixture
def models(scramble):
    """BERT for masked words, and ours with its weights."""
    sizes = {"vocab_size": V, "max_position_embeddings": MAX_LEN, "hidden_size": D, "num_hidden_layers": DEPTH}
    config = BertConfig(**sizes, num_attention_heads=N, intermediate_size=4 * D, type_vocab_size=2)
    theirs = scramble(BertForMaskedLM(config))
    ours = MaskedLanguageModel(encoder=encoder(), vocab_size=V, bias=True, transform="gelu", norm_eps=1e-12)
    copied(ours.encoder, theirs.bert)
    head_copied(ours.vocabulary_head, theirs.cls.predictions)
    return theirs, ours.eval()


def test_equals_bert_for_masked_words(models):
    theirs, ours = models
    tokens, seen = torch.randint(3, MASK, (2, MAX_LEN)), torch.arange(MAX_LEN) < torch.tensor([[7], [MAX_LEN]])
    places = torch.tensor([1, 5, MAX_LEN, MAX_LEN + 9])
    labels = torch.full((2 * MAX_LEN,), -100)
    labels[places] = torch.randint(V, (4,))
    truth = theirs(tokens, attention_mask=seen.long(), labels=labels.view(2, -1))
    hidden = ours(tokens, seen.long(), None, places)
    logits = ours.head.logits(hidden)
    torch.testing.assert_close(logits, truth.logits.flatten(0, 1)[places], rtol=0, atol=1e-5)
    loss = torch.nn.functional.cross_entropy(logits, labels[places])
    torch.testing.assert_close(loss, truth.loss, rtol=0, atol=1e-5)


def test_the_pseudo_log_likelihood_masks_one_token_at_a_time(models):
    ours, ids = models[1].double(), [1, 7, 8, 9, 7, 2]
    total = 0.0
    for at in range(1, 5):
        row = torch.tensor([[*ids[:at], MASK, *ids[at + 1 :]]])
        rows = InputRows(row, torch.ones_like(row), places=torch.tensor([at]))
        total += gap_probabilities(ours, rows)[0, ids[at]].log().item()
    assert pseudo_log_likelihood(ours, ids, mask_id=MASK, device="cpu") == pytest.approx(total, abs=1e-6)
    assert pseudo_log_likelihood(ours, [1, 2], mask_id=MASK, device="cpu") == 0
