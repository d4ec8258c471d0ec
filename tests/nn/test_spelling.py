"""Spelling: the same vectors as a convolution over each word by itself, whatever stands beside it."""

import pytest
import torch
import torch.nn.functional as F

from vlm.nn.embeddings import Spelling

ACUTE = " \N{LATIN SMALL LETTER E WITH ACUTE}"
PIECES = [b"", b"", b" the", b" c", b"at", b"s", ACUTE.encode(), b" longerword", b"\xff"]
WORDS = {  # by the ids of their pieces
    (2,): b" the",
    (3, 4): b" cat",
    (3, 4, 5): b" cats",
    (6, 5): f"{ACUTE}s".encode(),
    (7, 5): b" longerwor",  # 10 bytes are read
    (3, 8): b" c\xfe",
}


@pytest.fixture
def spelling():
    torch.manual_seed(0)
    layer = Spelling(vocab_size=len(PIECES), dim=6, width=12, byte_dim=4, kernel=3, longest=10)
    layer.learn(PIECES)
    return layer


def plainly(layer, word):
    """The vector of a word alone, by torch's own convolution."""
    x = layer.byte_embed(torch.tensor([byte + 1 for byte in word])).T[None]  # (1, byte_dim, M)
    kernel = layer.convolution.weight.view(12, 4, 3)
    found = F.conv1d(x, kernel, layer.convolution.bias, padding=1).relu().amax(2)
    return layer.project(found)[0]


@pytest.mark.parametrize("ids", WORDS)
def test_a_word_is_read_as_by_a_convolution_over_it_alone(spelling, ids):
    beside = [1, *ids, 2, 0]  # a special token before, another word and padding after
    rows = torch.tensor([[1, 7, *[0] * len(ids), 0], beside])
    vectors = spelling(rows, torch.arange(len(beside)))[1, 1 : 1 + len(ids)]
    torch.testing.assert_close(vectors, plainly(spelling, WORDS[ids]).expand(len(ids), -1))


def test_special_tokens_have_no_spelling_and_rows_do_not_join(spelling):
    vectors = spelling(torch.tensor([[3, 4], [5, 1]]), torch.arange(2))  # the second row begins inside a word
    torch.testing.assert_close(vectors[1, 0], plainly(spelling, b"s"))
    torch.testing.assert_close(vectors[1, 1], spelling.project.bias)


def test_every_part_learns(spelling):
    spelling(torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), torch.arange(7)).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in spelling.parameters())
