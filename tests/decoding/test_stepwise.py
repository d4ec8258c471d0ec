"""Greedy search against uncached decoding, one token at a time."""

import pytest
import torch

from vlm.decoding.loop import decode_batch
from vlm.decoding.options import Decoding, Hypothesis
from vlm.models.context import Context

V, MAX_LEN, BOS = 31, 10, 1
NEVER = V  # an end token that no logits have


@pytest.fixture
def decoder(make_decoder):
    return make_decoder(V, MAX_LEN)


@pytest.fixture
def context():
    return Context(torch.randn(4, 5, 6), torch.arange(5) < torch.tensor([[5], [3], [4], [5]]))


def greedy(decoder, context, *, eos_id, max_tokens=MAX_LEN) -> list[Hypothesis]:
    decoding = Decoding(max_tokens=max_tokens)
    return [row[0] for row in decode_batch(decoder, context, decoding, bos_id=BOS, eos_id=eos_id)]


def tokens(texts: list[Hypothesis]) -> list[list[int]]:
    return [text.tokens for text in texts]


def row(context, index):
    return Context(context.states[index : index + 1], context.mask[index : index + 1])


@torch.no_grad()
def step_by_step(decoder, context):
    """A text of the likeliest tokens and their log-probabilities, without a cache."""
    text, logprobs = [BOS], []
    for _ in range(MAX_LEN):
        found = decoder.head(decoder(torch.tensor([text]), None, context))[0, -1].log_softmax(-1)
        logprobs.append(found.max().item())
        text.append(found.argmax().item())
    return text[1:], logprobs


def test_takes_the_most_probable_token_at_each_step(decoder, context):
    texts, logprobs = zip(*(step_by_step(decoder, row(context, index)) for index in range(4)), strict=True)
    assert len(set(map(tuple, texts))) > 2
    found = greedy(decoder, context, eos_id=NEVER)
    assert tokens(found) == [*texts]
    expected = torch.tensor(logprobs)
    torch.testing.assert_close(torch.tensor([text.logprobs for text in found]), expected, rtol=0, atol=1e-5)


def test_stops_at_the_end_token_each_row_for_itself(decoder, context):
    full = tokens(greedy(decoder, context, eos_id=NEVER))
    eos = full[0][3]
    found = greedy(decoder, context, eos_id=eos)
    expected = [text[: text.index(eos) + 1] if eos in text else text for text in full]
    assert tokens(found) == expected
    assert len({len(text) for text in expected}) > 1
    assert [len(text.logprobs) for text in found] == [len(text) for text in expected]


class ScriptedDecoder:
    """Writes the given texts and counts its steps and the rows of each."""

    max_len = 9

    def __init__(self, *texts):
        self.texts, self.steps, self.rows = torch.tensor(texts), 0, []

    def start(self, context, *, rows, max_len, beams):
        return self

    def select(self, rows):
        self.texts = self.texts[rows]

    def step(self, tokens, state):
        self.steps += 1
        self.rows.append(len(tokens))
        return torch.nn.functional.one_hot(self.texts[:, self.steps - 1 : self.steps], V).float()

    def head(self, hidden):
        return hidden


def test_no_step_is_taken_once_every_row_has_ended():
    decoder = ScriptedDecoder([5, 2, 5, 5, 5, 5], [5, 5, 5, 2, 5, 5])
    found = greedy(decoder, Context(torch.empty(2, 1, 6)), eos_id=2, max_tokens=6)
    assert tokens(found) == [[5, 2], [5, 5, 5, 2]]
    assert decoder.steps == 4
    assert decoder.rows == [2, 2, 1, 1]


@pytest.mark.parametrize("max_tokens", [0, 1, 4, MAX_LEN, 99])
def test_no_text_is_longer_than_max_tokens_or_the_room(decoder, context, max_tokens):
    full = tokens(greedy(decoder, context, eos_id=NEVER))
    found = greedy(decoder, context, eos_id=NEVER, max_tokens=max_tokens)
    assert tokens(found) == [text[:max_tokens] for text in full]
    assert [len(text.logprobs) for text in found] == [min(max_tokens, MAX_LEN)] * 4


def test_the_end_token_does_not_count(decoder, context):
    texts = tokens(greedy(decoder, context, eos_id=NEVER))
    every = ((place, i) for place, text in enumerate(texts) for i in range(1, MAX_LEN) if text[i] not in text[:i])
    place, end = next(every)
    text = texts[place]
    assert tokens(greedy(decoder, row(context, place), eos_id=text[end], max_tokens=end)) == [text[: end + 1]]
