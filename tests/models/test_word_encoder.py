"""The encoder of words against convolutions over one text, whatever the rows and the tokenizer."""

import pytest
import torch
import torch.nn.functional as F

from vlm.data.text.inputs import EncodedSample, encode_words, input_rows
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer
from vlm.errors import UserError
from vlm.models.classifier import TokenClassifier
from vlm.models.graphs import graphs_of
from vlm.models.word_encoder import WordEncoder
from vlm.nn.embeddings import Spelling

D = 12
SENTENCES = [
    ["The", "cats", "'s", "mat", "."],
    ["Hà Nội", "đẹp"],
    ["日本", "語"],
    ["a"],
    ["of", "The", "cats", "x"] * 4,
]


def make(tokenizer, scramble):
    torch.manual_seed(0)
    spelling = Spelling(vocab_size=tokenizer.vocab_size, dim=D, width=8, byte_dim=4)
    encoder = WordEncoder(max_len=99, dim=D, depth=2, spelling=spelling, affixes=3, buckets=64, dropout=0.3)
    model = scramble(TokenClassifier(encoder=encoder, num_classes=3)).double()
    spelling.learn([tokenizer.bytes_of(id) for id in range(tokenizer.vocab_size)])
    return model


@pytest.fixture
def model(scramble):
    return make(ByteTokenizer(), scramble)


def rows_of(sentences, tokenizer=None):
    tokenizer = tokenizer or ByteTokenizer()
    return input_rows([EncodedSample(encode_words(tokenizer, 99, words)) for words in sentences], tokenizer.pad_id)


def logits(model, rows):
    return model(rows.tokens, rows.segments, rows.types, rows.places)


@torch.no_grad()
@pytest.mark.parametrize("words", SENTENCES, ids=" ".join)
def test_states_are_gated_convolutions_over_words(model, words):
    encoder = model.encoder
    codes = torch.zeros(len(words) + 2, 24, dtype=torch.long)  # begin and end have no bytes
    for at, word in enumerate(words, 1):
        spelled = (" " + "\u00a0".join(word.split(" "))).encode()
        codes[at, : len(spelled)] = torch.tensor(list(spelled)) + 1
    x = encoder.norm(encoder.spelling.embed_words(codes) + encoder.affixes(codes))
    for layer in encoder.layers:
        kernel = layer.linear.weight.unflatten(1, (3, D)).transpose(1, 2)  # (2D, D, 3)
        x = x + F.glu(F.conv1d(layer.norm(x).T[None], kernel, layer.linear.bias, padding=1)[0].T, -1)
    torch.testing.assert_close(logits(model, rows_of([words])), model.head(x[1:-1]))


@torch.no_grad()
def test_texts_in_shared_rows_have_the_states_of_each_alone(model):
    rows = rows_of(SENTENCES)
    assert len(rows.tokens) < len(SENTENCES)
    alone = torch.cat([logits(model, rows_of([words])) for words in SENTENCES])
    torch.testing.assert_close(logits(model, rows), alone)
    ids = rows_of(SENTENCES[:1]).tokens
    torch.testing.assert_close(model.encoder(ids).states, model.encoder(ids, torch.ones_like(ids)).states)


@torch.no_grad()
def test_tokens_count_only_by_their_bytes(model, scramble):
    characters = CharTokenizer().fit([" ".join(words).replace(" ", " \u00a0") for words in SENTENCES])
    found = logits(make(characters, scramble), rows_of(SENTENCES, characters))
    torch.testing.assert_close(found, logits(model, rows_of(SENTENCES)))


def test_every_parameter_gets_a_gradient(model):
    logits(model.train(), rows_of(SENTENCES)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_there_is_no_graph_of_spelling(model):
    with pytest.raises(UserError, match=r"^model\.encoder\.spelling: Spelling has no graph: "):
        graphs_of(model)
