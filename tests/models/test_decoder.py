"""What must always hold of the decoder, however it is built; tests/checkpoint compare it with Hugging Face's."""

import pytest
import torch

from vlm.data.batch import Targets, next_token_labels
from vlm.models.context import Context, Prefix
from vlm.models.decoder import Decoder
from vlm.models.heads import VocabularyHead
from vlm.nn.position import (
    BucketedBias,
    LearnedPositions,
    LearnedPositionsEachLayer,
    Positions,
    RelativeBias,
    RotaryPositions,
    SinusoidalPositions,
    SplitSinusoids,
)
from vlm.training.step.losses import token_loss

V, MAX_LEN, D, DEPTH, N = 31, 20, 24, 2, 3
SIZES = {"vocab_size": V, "max_len": MAX_LEN, "dim": D, "depth": DEPTH, "num_heads": N}
SEGMENTS = torch.tensor([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3]])
MODERN = {"norm": "rms", "activation": "swiglu", "bias": False, "num_kv_heads": 1}
LONG = RotaryPositions(head_dim=10, scaling="llama3", factor=8.0, trained_len=16)


def prefix(**options):
    return {"context_dim": None, "prefix": Prefix(dim=D, context_dim=7, **options)}


def rotary(**options):
    return {"positions": RotaryPositions(head_dim=D // N, **options)}


def each_layer(max_len=MAX_LEN):
    return {"positions": LearnedPositionsEachLayer(head_dim=D // N, max_len=max_len)}


def relative(max_len=MAX_LEN):
    return {"positions": RelativeBias(num_heads=N, max_len=max_len)}


VARIANTS = {
    "learned": dict,
    "each_layer": each_layer,
    "each_layer_modern": lambda: MODERN | each_layer() | {"qk_norm": True},
    "rotary": rotary,
    "relative": relative,
    "relative_near": lambda: relative(max_len=3),
    "sinusoidal": lambda: {"positions": SinusoidalPositions(dim=D)},
    "marian": lambda: (
        {"positions": SplitSinusoids(dim=D), "pre_norm": False, "activation": "silu", "embed_scale": D**0.5}
        | {"vocabulary_head": VocabularyHead(dim=D, vocab_size=V, bias=True)}
    ),
    "t5": lambda: (
        {"positions": BucketedBias(num_heads=N, buckets=8, furthest=9), "norm": "rms", "bias": False, "attn_scale": 1.0}
        | {"head_dim": 5, "vocabulary_head": VocabularyHead(dim=D, vocab_size=V, scale=D**-0.5)}
    ),
    "no_positions": lambda: {"positions": Positions()},
    "post_norm": lambda: {"pre_norm": False, "activation": "relu"},
    "grouped": lambda: {"num_heads": 4, "num_kv_heads": 2, "head_dim": 5},
    "modern": lambda: MODERN | rotary(),
    "qwen": lambda: MODERN | {"qkv_bias": True, "qk_norm": "rms", "head_dim": 10, "positions": LONG},
    "gemma": lambda: (
        MODERN
        | {"norm": "rms_plus_one", "activation": "geglu_tanh", "hidden_dim": 40, "embed_scale": D**0.5}
        | rotary(scaling="linear", factor=4.0)
    ),
    "cosine": lambda: MODERN | rotary() | {"qk_norm": True},
    "cosine_relative": lambda: relative() | {"qk_norm": True},
    "prefix": prefix,
    "prefix_counted": lambda: prefix(counted=True, norm=True) | {"positions": LearnedPositions(dim=D, max_len=27)},
    "prefix_rotary": lambda: MODERN | prefix() | rotary(),
    "prefix_counted_rotary": lambda: prefix(counted=True) | rotary(),
    "prefix_causal": lambda: MODERN | prefix(counted=True, causal=True) | rotary(),
    "prefix_relative": lambda: prefix() | relative(),
    "prefix_each_layer": lambda: prefix() | each_layer(),
    "prefix_counted_each_layer": lambda: prefix(counted=True) | each_layer(max_len=27),
    "git": lambda: (
        prefix(norm=True)
        | {"pre_norm": False, "embed_norm": True}
        | {"vocabulary_head": VocabularyHead(dim=D, vocab_size=V, tied=False, bias=True)}
    ),
}


@pytest.fixture(params=VARIANTS)
def build(request):
    """Builds a decoder of each kind."""
    return lambda **options: Decoder(**SIZES | options | VARIANTS[request.param]())


@pytest.fixture
def decoder(build, scramble):
    return scramble(build(context_dim=7))


@pytest.fixture
def plain(scramble):
    return scramble(Decoder(**SIZES, context_dim=7))


@pytest.fixture
def context():
    return Context(torch.randn(1, 5, 7))


def tokens_like(segments):
    return torch.randint(V, segments.shape)


def test_every_parameter_gets_a_gradient(decoder, context):
    logits = decoder.head(decoder(tokens_like(SEGMENTS), SEGMENTS, context))
    (logits * torch.randn_like(logits)).sum().backward()
    assert not [name for name, p in decoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


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
    """In float64: rounding in float32 depends on the processor."""
    context = Context(torch.randn(2, 5, 7).double(), torch.arange(5) < torch.tensor([[5], [3]]))
    tokens = torch.randint(V, (2 * beams, sum(chunks)))
    copies = context.rows(torch.arange(2).repeat_interleave(beams))
    state = decoder.double().start(context, rows=2 * beams, max_len=8)
    stepped = torch.cat([decoder.step(part, state) for part in tokens.split(chunks, 1)], 1)
    assert state.length == 8
    torch.testing.assert_close(stepped, decoder(tokens, None, copies), rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunks", [[10], [6, 1, 1, 1, 1], [1] * 10])
def test_ragged_rows_equal_each_row_alone(build, scramble, chunks):
    """Also where some of them go on in another order."""
    decoder, chosen = scramble(build()).double(), torch.tensor([2, 0])
    starts, tokens = torch.tensor([0, 3, 7]), torch.randint(V, (3, 12))
    alone = [decoder(tokens[row : row + 1, start:])[0] for row, start in enumerate(starts.tolist())]
    state = decoder.start(None, rows=3, max_len=12, starts=starts)
    stepped = torch.cat([decoder.step(part, state) for part in tokens[:, :10].split(chunks, 1)], 1)
    assert stepped.isfinite().all()
    for row, start in enumerate(starts.tolist()):
        torch.testing.assert_close(stepped[row, start:], alone[row][: 10 - start], rtol=0, atol=1e-12)
    state.select(chosen)
    later = decoder.step(tokens[chosen, 10:], state)
    torch.testing.assert_close(later, torch.stack([alone[row][-2:] for row in chosen]), rtol=0, atol=1e-12)


def test_bfloat16_stays_near_float32(build, context):
    decoder = build(context_dim=7).eval()
    tokens = tokens_like(SEGMENTS)
    exact = decoder(tokens, SEGMENTS, context)
    with torch.autocast("cpu", torch.bfloat16):
        rough = decoder(tokens, SEGMENTS, context)
        state = decoder.start(context, rows=1, max_len=6)
        decoder.step(tokens[:, :3], state)
        decoder.step(tokens[:, 3:4], state)
    assert (rough.float() - exact).square().mean() < 0.01 * exact.square().mean()


def test_decoding_has_room_for_max_len_and_no_more(plain, context):
    plain.start(context, rows=1, max_len=MAX_LEN)
    with pytest.raises(ValueError, match="more than the decoder's 20 positions"):
        plain.start(context, rows=1, max_len=MAX_LEN + 1)


def test_context_is_seen_and_its_mask_respected(decoder):
    tokens, states = torch.randint(V, (1, 6)), torch.randn(1, 5, 7)
    seen = decoder(tokens, None, Context(states))
    assert (seen - decoder(tokens, None, Context(torch.randn(1, 5, 7)))).abs().max() > 0.01
    mask = torch.tensor([[True, True, True, False, False]])
    torch.testing.assert_close(
        decoder(tokens, None, Context(states, mask)), decoder(tokens, None, Context(states[:, :3])), rtol=0, atol=1e-5
    )


def test_a_text_is_a_product_of_its_words(plain):
    """Pr(t1 ... t5) of "Learning deep learning is fun" is Pr(t1) Pr(t2 | t1) ... Pr(t5 | t1 ... t4), five factors.

    One pass over the whole row gives all of them: what stands at a place predicts the word after it.
    """
    row = torch.tensor([[1, 5, 6, 7, 8, 9]])  # begin, and five words
    labels = next_token_labels(row, None)
    assert labels.tolist() == [[5, 6, 7, 8, 9, -100]]
    total, count = token_loss(plain(row), Targets.from_labels(labels), plain.head_parts)
    factors = [plain.head(plain(row[:, :place])[:, -1]).softmax(-1)[0, row[0, place]] for place in range(1, 6)]
    assert count == len(factors) == 5
    torch.testing.assert_close(torch.stack(factors).prod().log(), -total, rtol=1e-5, atol=0)


def test_the_weights_of_gpt_3():
    """96 layers of 12 x 12,288² weights, 173.9 billion; 174.6 with 50,257 tokens and 2,048 positions."""
    width, depth = 12_288, 96
    with torch.device("meta"):
        model = Decoder(vocab_size=50_257, max_len=2_048, dim=width, depth=1, num_heads=96)
    weights = list(model.blocks[0].parameters())
    block = sum(p.numel() for p in weights if p.ndim > 1)
    assert block == 12 * width**2 and model.blocks[0].attn.head_dim == 128 and round(depth * block / 1e8) == 1739
    others = (depth - 1) * sum(p.numel() for p in weights)
    assert round((sum(p.numel() for p in model.parameters()) + others) / 1e8) == 1746
