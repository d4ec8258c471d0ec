"""Searches of all kinds over a queue of images, as the tests of the engine run them."""

from collections import Counter

import pytest
import torch

from vlm.decoding.constraints import Rules
from vlm.decoding.loop import decode, decode_batch
from vlm.decoding.options import Decoding
from vlm.decoding.sampling import Sampling
from vlm.models.context import Context
from vlm.nn.position import LearnedPositionsEachLayer, RelativeBias, RotaryPositions, SinusoidalPositions

V, MAX_LEN, BOS, IMAGES = 23, 9, 1, 9
POSITIONS = {
    "learned": lambda: None,
    "rotary": lambda: RotaryPositions(head_dim=8),
    "relative": lambda: RelativeBias(num_heads=2, max_len=MAX_LEN),
    "sinusoidal": lambda: SinusoidalPositions(dim=16),
    "each layer": lambda: LearnedPositionsEachLayer(head_dim=8, max_len=MAX_LEN),
}
SEARCHES = {
    "greedy": {},
    "beam": {"beam": 3, "results": 2, "length_penalty": 0.5},
    "groups": {"beam": 4, "groups": 2, "results": 2},
    "sample": {"sampling": Sampling(temperature=1.2, top_k=9), "results": 2, "seed": 3},
    "rules": {"beam": 2, "rules": Rules(prefix=(7,), no_repeat_ngram=1, min_tokens=3, banned=((4,),))},
    "required": {"beam": 3, "rules": Rules(required=(((8, 9),),))},
}


def part(context, places):
    """The contexts of some inputs, as long as the longest of them, as those of a batch of texts are."""
    index = torch.tensor(places)
    length = int(context.mask[index].sum(1).max())
    return Context(context.states[index, :length], context.mask[index, :length])


def common_token(decoder, context):
    """The token that most texts hold: as the end token it ends them at different places."""
    free = decode_batch(decoder, context, Decoding(), bos_id=BOS, eos_id=-1)
    free += decode_batch(decoder, context, Decoding(sampling=Sampling()), bos_id=BOS, eos_id=-1)
    held = Counter(token for row in free for token in set(row[0].tokens[1:]) - set(row[0].tokens[:1]))
    return held.most_common(1)[0][0]


def run(decoder, context, decoding, *, eos_id, order=None, chunk=4, rows=3, device="cpu"):
    """Texts of each image, taken from a queue in chunks."""
    order = list(range(len(context.states))) if order is None else order
    parts = [order[at : at + chunk] for at in range(0, len(order), chunk)]
    chunks = [([f"image {place}" for place in places], part(context, places)) for places in parts]
    found = dict(decode(decoder, chunks, decoding, bos_id=BOS, eos_id=eos_id, rows=rows, device=device))
    return [found[order.index(place)] for place in range(len(order))]


def check_same_texts(found, truth):
    assert [[text.tokens for text in row] for row in found] == [[text.tokens for text in row] for row in truth]
    for row, other in zip(found, truth, strict=True):
        for text, twin in zip(row, other, strict=True):
            assert text.logprobs == pytest.approx(twin.logprobs, abs=1e-5)
            assert text.score == pytest.approx(twin.score, abs=1e-5)
