"""Alignments of two texts: word by word what the tokens attended to, and their picture."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from vlm.data.text.tokenizer import ByteTokenizer
from vlm.inference.attention.pictures import Alignment, draw_alignment, read_alignment
from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.models.recurrent import BahdanauDecoder, RecurrentDecoder

SIZES = {"vocab_size": ByteTokenizer().vocab_size, "max_len": 20, "dim": 8, "context_dim": 6}
DECODERS = {
    "soft": lambda: BahdanauDecoder(**SIZES, attention_dim=5),
    "heads": lambda: Decoder(**SIZES, depth=2, num_heads=2),
}


@pytest.mark.parametrize("name", DECODERS)
def test_words_have_the_weights_of_their_tokens(name):
    tokenizer, decoder = ByteTokenizer(), DECODERS[name]().eval()
    read = [tokenizer.bos_id, *tokenizer.encode("ab cde"), tokenizer.eos_id]
    written = tokenizer.encode("xy z")
    context = Context(torch.randn(1, len(read), 6))
    found = read_alignment(decoder, tokenizer, context, read, written)
    assert (found.source, found.translation) == (["ab", "cde"], ["xy", "z"])
    weights = decoder.attention(torch.tensor([[tokenizer.bos_id, *written[:-1]]]), context)[0].detach().numpy()
    # " cde" and " z" begin with their space, as words do in the other pictures
    truth = [[weights[at, of].sum(-1).mean() for of in (slice(1, 3), slice(3, 7))] for at in (slice(0, 2), slice(2, 4))]
    np.testing.assert_allclose(found.weights, truth, rtol=1e-5)


def test_a_decoder_without_attention_has_none():
    context = Context(torch.randn(1, 4, 6))
    assert read_alignment(RecurrentDecoder(**SIZES), ByteTokenizer(), context, [1, 40, 41, 2], [42]) is None


def test_the_picture_is_dark_where_the_weight_is():
    weights = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    picture = Image.open(BytesIO(draw_alignment(Alignment(["a", "b"], ["eins", "zwei", "drei"], weights))))
    grey = np.asarray(picture.convert("L"))[-20 - 3 * 26 : -20, -20 - 2 * 26 : -20].reshape(3, 26, 2, 26)
    inner = grey[:, 5:20, :, 5:20].mean((1, 3))
    np.testing.assert_allclose(inner, 255 * (1 - weights), atol=1)
