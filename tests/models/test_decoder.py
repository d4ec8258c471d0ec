"""The decoder against Hugging Face's GPT-2, and what must always hold of it."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from vlm.generation.search import greedy
from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.tasks.losses import next_token_labels, token_loss

V, MAX_LEN, D, DEPTH, N = 31, 20, 24, 2, 3
SIZES = {"vocab_size": V, "max_len": MAX_LEN, "dim": D, "depth": DEPTH, "num_heads": N}
SEGMENTS = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3]])


@pytest.fixture
def gpt2(scramble):
    config = GPT2Config(
        vocab_size=V,
        n_positions=MAX_LEN,
        n_embd=D,
        n_layer=DEPTH,
        n_head=N,
        activation_function="gelu",
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = scramble(GPT2LMHeadModel(config))
    model.transformer.wpe.weight.data *= 4  # or a random model with tied embeddings repeats one token
    return model


@pytest.fixture
def decoder(scramble):
    return scramble(Decoder(**SIZES, context_dim=7))


@pytest.fixture
def context():
    return Context(torch.randn(1, 5, 7))


def tokens_like(segments):
    return torch.randint(V, segments.shape)


def test_logits_equal_gpt2(gpt2, copy_gpt2):
    decoder = copy_gpt2(Decoder(**SIZES), gpt2)
    tokens = torch.randint(V, (3, MAX_LEN))
    torch.testing.assert_close(decoder.head(decoder(tokens)), gpt2(tokens).logits, rtol=0, atol=1e-4)


def test_greedy_text_equals_gpt2(gpt2, copy_gpt2):
    decoder = copy_gpt2(Decoder(**SIZES), gpt2)
    theirs = gpt2.generate(torch.tensor([[1]]), max_new_tokens=MAX_LEN - 1, do_sample=False)[0, 1:].tolist()
    assert len(set(theirs)) > 3  # a text, not one token over and over
    ours = greedy(decoder, Context(torch.empty(1, 1, D)), bos_id=1, eos_id=-1, max_tokens=MAX_LEN - 1)
    assert ours.tokens == [theirs]


@pytest.mark.parametrize("changed", range(SEGMENTS.shape[1]))
def test_a_token_is_seen_from_itself_to_the_end_of_its_segment_only(decoder, context, changed):
    tokens = tokens_like(SEGMENTS)
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % V
    before, after = (decoder(row, SEGMENTS, context) for row in (tokens, other))
    difference = (before - after).abs().amax(-1)[0]
    sees = (SEGMENTS[0] == SEGMENTS[0, changed]) & (torch.arange(SEGMENTS.shape[1]) >= changed)
    assert difference[~sees].max() == 0
    assert difference[sees].min() > 1e-3


def test_a_packed_row_equals_its_captions_one_by_one(decoder, context):
    segments = torch.cat([SEGMENTS, torch.zeros(1, 3, dtype=torch.long)], 1)
    tokens = tokens_like(segments)
    packed = decoder(tokens, segments, context)
    assert packed.isfinite().all()
    for segment in (1, 2, 3):
        where = segments[0] == segment
        alone = decoder(tokens[:, where], None, context)
        torch.testing.assert_close(packed[:, where], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunks", [[1] * 8, [3, 1, 4]])
@pytest.mark.parametrize("beams", [1, 3])
def test_cached_decoding_equals_uncached(decoder, chunks, beams):
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    states = torch.randn(2, 5, 7)
    tokens = torch.randint(V, (2 * beams, sum(chunks)))
    copies = Context(states.repeat_interleave(beams, 0), mask.repeat_interleave(beams, 0))
    state = decoder.start(Context(states, mask), rows=2 * beams, max_len=8)
    stepped = torch.cat([decoder.step(part, state) for part in tokens.split(chunks, 1)], 1)
    assert state.length == 8
    torch.testing.assert_close(stepped, decoder(tokens, None, copies), rtol=0, atol=1e-5)


def test_decoding_has_room_for_max_len_and_no_more(decoder, context):
    decoder.start(context, rows=1, max_len=MAX_LEN)
    with pytest.raises(ValueError, match="more than the decoder's 20 positions"):
        decoder.start(context, rows=1, max_len=MAX_LEN + 1)


def test_context_is_seen_and_its_mask_respected(decoder):
    tokens, states = torch.randint(V, (1, 6)), torch.randn(1, 5, 7)
    seen = decoder(tokens, None, Context(states))
    assert (seen - decoder(tokens, None, Context(torch.randn(1, 5, 7)))).abs().max() > 0.01
    mask = torch.tensor([[True, True, True, False, False]])
    torch.testing.assert_close(
        decoder(tokens, None, Context(states, mask)), decoder(tokens, None, Context(states[:, :3])), rtol=0, atol=1e-5
    )


def test_loss_of_uniform_logits_is_the_log_of_the_vocabulary(decoder, context):
    torch.nn.init.zeros_(decoder.token_embed.weight)
    tokens = tokens_like(SEGMENTS)
    hidden = decoder(tokens, SEGMENTS, context)
    total, count = token_loss(hidden, next_token_labels(tokens, SEGMENTS), decoder.head)
    assert count == 9
    assert (total / count).item() == pytest.approx(math.log(V), rel=1e-6)
