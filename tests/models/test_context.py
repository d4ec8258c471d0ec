"""Context as a prefix, and images inside a text: what must hold of rows that have them.

tests/checkpoint compare GIT with Hugging Face's; test_decoder.py has its packed and cached rows.
"""

import pytest
import torch

from vlm.data.batch import pack
from vlm.decoding.loop import decode, decode_batch
from vlm.decoding.options import Decoding
from vlm.errors import UserError
from vlm.models.context import PLACE, Context, Prefix, interleave_states
from vlm.models.decoder import Decoder
from vlm.nn.attention import Texts, causal_segment_mask, prefix_mask
from vlm.nn.position import RotaryPositions
from vlm.nn.step.replay import FixedDecodeState

V, D, DEPTH, N, MAX_LEN = 31, 24, 2, 3, 20


def test_the_mask_of_a_row():
    segments = torch.tensor([[1, 1, 2, 0], [1, 1, 1, 1]])
    prefix = torch.tensor([[True, True], [True, False]])
    mask = prefix_mask(causal_segment_mask(segments), prefix, count=2, length=4, device=segments.device)
    drawn = [["".join(str(int(sees)) for sees in line) for line in row[0]] for row in mask]
    assert drawn[0] == ["110000", "110000", "111000", "111100", "110010", "110001"]
    assert drawn[1] == ["100000", "100000", "101000", "101100", "101110", "101111"]
    texts = Texts(segments, torch.tensor([0, 2, 3, 4, 8], dtype=torch.int32))
    assert prefix_mask(texts, prefix, count=2, length=4, device=segments.device).equal(mask)
    assert prefix_mask(None, None, count=1, length=1, device=segments.device).int().tolist() == [[[[1, 0], [1, 1]]]]
    between = prefix_mask(causal_segment_mask(segments), prefix, count=2, length=4, device=segments.device, causal=True)
    drawn = [["".join(str(int(sees)) for sees in line) for line in row[0]] for row in between]
    assert drawn[0] == ["100000", "110000", "111000", "111100", "110010", "110001"]
    causal = prefix_mask("causal", None, count=2, length=2, device=segments.device)
    assert causal.int().tolist() == [[[[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]]]


PROMPTS = [[3, PLACE, PLACE, 7, PLACE, 9, 4], [PLACE, PLACE, 5], [6, 2, PLACE, 8, 11]]


@pytest.fixture(params=[True, False], ids=["causal", "bidirectional"])
def inside(request, scramble):
    """A decoder of Llama's kind that takes images inside its text."""
    options = {"norm": "rms", "activation": "swiglu", "bias": False, "num_kv_heads": 1}
    prefix = Prefix(dim=D, context_dim=D, counted=True, causal=request.param)
    positions = RotaryPositions(head_dim=8)
    sizes = {"vocab_size": V, "max_len": MAX_LEN, "dim": D, "depth": DEPTH, "num_heads": N}
    return scramble(Decoder(**sizes, prefix=prefix, positions=positions, **options)).double()


def whole_row(decoder, prompt, text, states):
    """Logits after each token of a text, by blocks over one row under a mask that is written down here."""
    row = [*prompt, *text]
    x = decoder.token_embed(torch.tensor([[max(token, 0) for token in row]]))
    x[0, [at for at, token in enumerate(row) if token == PLACE]] = states
    places = torch.arange(len(row))
    sees = places[:, None] >= places
    if not decoder.prefix.causal:
        sees = sees | (torch.maximum(places[:, None], places) < len(prompt))
    for block in decoder.blocks:
        x = block(x, sees[None, None], decoder.positions.place(places, keys=len(row)))
    return decoder.head(decoder.norm(x))[:, len(prompt) - 1 :]


def states_of(prompt):
    torch.manual_seed(len(prompt))
    return torch.randn(prompt.count(PLACE), D, dtype=torch.float64)


@torch.no_grad()
@pytest.mark.parametrize("rows", [[0], [0, 1, 2]], ids=["one", "ragged"])
def test_tokens_and_states_of_a_prompt_are_one_row_with_its_texts(inside, rows):
    prompts = [PROMPTS[row] for row in rows]
    context = interleave_states(prompts, torch.cat([states_of(prompt) for prompt in prompts]))
    texts = [[[12, 13], [14, 15, 16]] for _ in prompts]  # two of each prompt
    begun = [[[prompt[-1], *text] for text in texts[row]] for row, prompt in enumerate(prompts)]
    tokens, segments = pack(begun, pad_id=0)
    packed = inside.head(inside(tokens, segments, context))
    for row, prompt in enumerate(prompts):
        for segment, text in enumerate(texts[row], start=1):
            truth = whole_row(inside, prompt, text, states_of(prompt))
            torch.testing.assert_close(packed[row][segments[row] == segment], truth[0], rtol=0, atol=1e-10)
    text = torch.tensor([[prompt[-1], 12, 13] for prompt in prompts])
    states = [inside.start(context, rows=len(prompts), max_len=3) for _ in range(2)]
    fixed = FixedDecodeState(states[1])
    for step in range(3):
        fixed.num_steps += 1
        for state in (states[0], fixed):
            logits = inside.head(inside.step(text[:, step : step + 1], state))[:, 0]
            for row, prompt in enumerate(prompts):
                truth = whole_row(inside, prompt, [12, 13][:step], states_of(prompt))[0, -1]
                torch.testing.assert_close(logits[row], truth, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 3])
def test_texts_of_prompts_that_join_are_those_of_each_alone(inside, beam):
    """Two rows decode three prompts of unequal length; the third takes over the row of the text that ends first."""
    contexts = [interleave_states([prompt], states_of(prompt)) for prompt in PROMPTS]
    options = {"bos_id": 1, "eos_id": 2}
    alone = [decode_batch(inside, context, Decoding(beam=beam, max_tokens=9), **options)[0] for context in contexts]
    assert len({tuple(texts[0].tokens) for texts in alone}) == 3
    chunks = [([place], context) for place, context in enumerate(contexts)]
    joined = dict(decode(inside, chunks, Decoding(beam=beam, max_tokens=9), rows=2, **options))
    assert [joined[place][0].tokens for place in range(3)] == [texts[0].tokens for texts in alone]
    for prompt, texts in zip(PROMPTS, alone, strict=True):
        logits = whole_row(inside, prompt, texts[0].tokens, states_of(prompt))[0, :-1].log_softmax(-1)
        logprobs = logits.gather(1, torch.tensor(texts[0].tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(texts[0].logprobs, dtype=torch.float64), logprobs, rtol=0, atol=1e-5)
        if beam == 1:
            assert logits.argmax(-1).tolist() == texts[0].tokens


@torch.no_grad()
def test_each_sample_of_a_packed_row_may_have_images_of_its_own(inside):
    rows = [[prompt for prompt in PROMPTS[:2]], [PROMPTS[2]]]
    tokens, segments = pack(rows, pad_id=0)
    states = torch.zeros(*tokens.shape, D, dtype=torch.float64)
    states[tokens == PLACE] = torch.cat([states_of(prompt) for prompt in PROMPTS])
    packed = inside.head(inside(tokens, segments, states=states))
    for prompt, at in zip(PROMPTS, [(0, 1), (0, 2), (1, 1)], strict=True):
        truth = whole_row(inside, prompt[:1], prompt[1:], states_of(prompt))[0]
        torch.testing.assert_close(packed[at[0]][segments[at[0]] == at[1]], truth, rtol=0, atol=1e-10)


def test_what_a_prefix_cannot_take_is_refused():
    sizes = {"vocab_size": V, "max_len": 8, "dim": D, "depth": 1, "num_heads": N}
    plain = Decoder(**sizes, prefix=Prefix(dim=D, context_dim=D))
    with pytest.raises(ValueError, match="needs counted=True"):
        plain.start(interleave_states([[3, PLACE]], torch.randn(1, D)), rows=1, max_len=8)
    counted = Decoder(**sizes, prefix=Prefix(dim=D, context_dim=D, counted=True))
    context, tokens = Context(torch.randn(1, 9, D)), torch.zeros(1, 3, dtype=torch.long)
    for use in (lambda: counted(tokens, None, context), lambda: counted.start(context, rows=1, max_len=8)):
        with pytest.raises(UserError, match=r"model\.position\.max_len: 8 positions are too few .* set it to 17"):
            use()
    with pytest.raises(ValueError, match=r"context_dim .* prefix"):
        Decoder(**sizes, context_dim=D, prefix=Prefix(dim=D, context_dim=D))
