"""The decoder against Hugging Face's GPT-2 and Llama, and what must always hold of it, however it is built."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vlm.data.batch import Targets, next_token_labels
from vlm.decoding.search import greedy
from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.models.fusion import Prefix
from vlm.models.heads import VocabularyHead
from vlm.nn.bucketed_bias import BucketedBias
from vlm.nn.position import (
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
VARIANTS = {
    "learned": dict,
    "each_layer": lambda: {"positions": LearnedPositionsEachLayer(head_dim=D // N, max_len=MAX_LEN)},
    "each_layer_modern": lambda: {
        **MODERN,
        "positions": LearnedPositionsEachLayer(head_dim=D // N, max_len=MAX_LEN),
        "qk_norm": True,
    },
    "rotary": lambda: {"positions": RotaryPositions(head_dim=D // N)},
    "relative": lambda: {"positions": RelativeBias(num_heads=N, max_len=MAX_LEN)},
    "relative_near": lambda: {"positions": RelativeBias(num_heads=N, max_len=3)},
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
    "modern": lambda: MODERN | {"positions": RotaryPositions(head_dim=D // N)},
    "qwen": lambda: MODERN | {"qkv_bias": True, "qk_norm": "rms", "head_dim": 10, "positions": LONG},
    "gemma": lambda: (
        MODERN
        | {"norm": "rms_plus_one", "activation": "geglu_tanh", "hidden_dim": 40, "embed_scale": D**0.5}
        | {"positions": RotaryPositions(head_dim=D // N, scaling="linear", factor=4.0)}
    ),
    "cosine": lambda: MODERN | {"qk_norm": True, "positions": RotaryPositions(head_dim=D // N)},
    "cosine_relative": lambda: {"qk_norm": True, "positions": RelativeBias(num_heads=N, max_len=MAX_LEN)},
    "prefix": lambda: prefix(),
    "prefix_counted": lambda: prefix(counted=True, norm=True) | {"positions": LearnedPositions(dim=D, max_len=27)},
    "prefix_rotary": lambda: MODERN | prefix() | {"positions": RotaryPositions(head_dim=D // N)},
    "prefix_counted_rotary": lambda: prefix(counted=True) | {"positions": RotaryPositions(head_dim=D // N)},
    "prefix_causal": lambda: (
        prefix(counted=True, causal=True) | MODERN | {"positions": RotaryPositions(head_dim=D // N)}
    ),
    "prefix_relative": lambda: prefix() | {"positions": RelativeBias(num_heads=N, max_len=MAX_LEN)},
    "prefix_each_layer": lambda: prefix() | {"positions": LearnedPositionsEachLayer(head_dim=D // N, max_len=MAX_LEN)},
    "prefix_counted_each_layer": lambda: (
        prefix(counted=True) | {"positions": LearnedPositionsEachLayer(head_dim=D // N, max_len=27)}
    ),
    "git": lambda: (
        prefix(norm=True)
        | {"pre_norm": False, "embed_norm": True}
        | {"vocabulary_head": VocabularyHead(dim=D, vocab_size=V, tied=False, bias=True)}
    ),
}


def prefix(**options):
    return {"context_dim": None, "prefix": Prefix(dim=D, context_dim=7, **options)}


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


@pytest.mark.parametrize("theirs, ours", [("gelu_new", "gelu_tanh"), ("gelu", "gelu"), ("relu", "relu")])
def test_logits_equal_gpt2(gpt2, load, theirs, ours):
    model = gpt2(activation_function=theirs)
    decoder = load(Decoder(**SIZES, activation=ours), model)
    tokens = torch.randint(V, (3, MAX_LEN))
    torch.testing.assert_close(decoder.head(decoder(tokens)), model(tokens).logits, rtol=0, atol=1e-4)


def test_greedy_text_equals_gpt2(gpt2, load):
    model = gpt2()
    decoder = load(Decoder(**SIZES, activation="gelu_tanh"), model)
    theirs = model.generate(torch.tensor([[1]]), max_new_tokens=MAX_LEN - 1, do_sample=False)[0, 1:].tolist()
    assert len(set(theirs)) > 3  # a text, not one token over and over
    ours = greedy(decoder, Context(torch.empty(1, 1, D)), bos_id=1, eos_id=-1, max_tokens=MAX_LEN - 1)
    assert ours.tokens == [theirs]


@pytest.fixture
def llama(scramble):
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=64,  # two thirds of 4 D
        num_hidden_layers=DEPTH,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LEN,
        rms_norm_eps=1e-6,
        rope_theta=500.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return scramble(LlamaForCausalLM(config))


@pytest.fixture
def like_llama(llama):
    """Our decoder of Llama's kind, with its weights."""
    options = {"num_heads": 6, "num_kv_heads": 2, "norm": "rms", "norm_eps": 1e-6, "activation": "swiglu"}
    rotary = RotaryPositions(head_dim=D // 6, base=500.0)
    decoder = Decoder(**SIZES | options, bias=False, positions=rotary).eval()
    theirs = llama.state_dict()
    state = {"token_embed.weight": theirs["model.embed_tokens.weight"], "norm.weight": theirs["model.norm.weight"]}
    for n in range(DEPTH):
        layer = {name.removeprefix(f"model.layers.{n}."): tensor for name, tensor in theirs.items()}
        state |= {
            f"blocks.{n}.norm1.weight": layer["input_layernorm.weight"],
            f"blocks.{n}.norm2.weight": layer["post_attention_layernorm.weight"],
            f"blocks.{n}.attn.qkv.weight": torch.cat([layer[f"self_attn.{part}_proj.weight"] for part in "qkv"]),
            f"blocks.{n}.attn.proj.weight": layer["self_attn.o_proj.weight"],
            f"blocks.{n}.mlp.fc1.weight": torch.cat([layer[f"mlp.{part}_proj.weight"] for part in ("gate", "up")]),
            f"blocks.{n}.mlp.fc2.weight": layer["mlp.down_proj.weight"],
        }
    decoder.load_state_dict(state)
    return decoder


def test_logits_equal_llama(llama, like_llama):
    tokens = torch.randint(V, (3, MAX_LEN))
    theirs = llama(tokens).logits
    assert theirs.std() > 0.5
    torch.testing.assert_close(like_llama.head(like_llama(tokens)), theirs, rtol=0, atol=1e-4)


def test_greedy_text_equals_llama(llama, like_llama):
    theirs = llama.generate(torch.tensor([[1]]), max_new_tokens=MAX_LEN - 1, do_sample=False)[0, 1:].tolist()
    ours = greedy(like_llama, Context(torch.empty(1, 1, D)), bos_id=1, eos_id=-1, max_tokens=MAX_LEN - 1)
    assert ours.tokens == [theirs]


def test_every_parameter_gets_a_gradient(decoder, context):
    logits = decoder.head(decoder(tokens_like(SEGMENTS), SEGMENTS, context))
    (logits * torch.randn_like(logits)).sum().backward()
    assert not [name for name, p in decoder.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]


def test_a_token_is_seen_from_itself_to_the_end_of_its_segment_only(decoder, context):
    tokens = tokens_like(SEGMENTS)
    before = decoder(tokens, SEGMENTS, context)
    for changed in range(SEGMENTS.shape[1]):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % V
        difference = (before - decoder(other, SEGMENTS, context)).abs().amax(-1)[0]
        sees = (SEGMENTS[0] == SEGMENTS[0, changed]) & (torch.arange(SEGMENTS.shape[1]) >= changed)
        assert difference[~sees].max() == 0, changed
        assert difference[sees].min() > 1e-3, changed


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
    decoder = scramble(build()).double()
    starts = torch.tensor([0, 3, 7])
    tokens = torch.randint(V, (3, 10))
    state = decoder.start(None, rows=3, max_len=10, starts=starts)
    stepped = torch.cat([decoder.step(part, state) for part in tokens.split(chunks, 1)], 1)
    assert stepped.isfinite().all()
    for row, start in enumerate(starts.tolist()):
        alone = decoder(tokens[row : row + 1, start:])
        torch.testing.assert_close(stepped[row : row + 1, start:], alone, rtol=0, atol=1e-12)


def test_selected_rows_go_on_as_they_would_have(build, scramble):
    decoder = scramble(build()).double()
    starts, tokens, chosen = torch.tensor([0, 3, 1]), torch.randint(V, (3, 8)), torch.tensor([2, 0])
    state = decoder.start(None, rows=3, max_len=8, starts=starts)
    decoder.step(tokens[:, :6], state)
    state.select(chosen)
    stepped = decoder.step(tokens[chosen, 6:], state)
    for row, source in enumerate(chosen.tolist()):
        alone = decoder(tokens[source : source + 1, starts[source] :])
        torch.testing.assert_close(stepped[row : row + 1], alone[:, -2:], rtol=0, atol=1e-12)


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


@pytest.mark.parametrize("positions, differ", [(None, True), (Positions(), False)])
def test_what_comes_first_matters_by_position_only(scramble, positions, differ):
    decoder = scramble(Decoder(**SIZES | {"depth": 1}, positions=positions))
    tokens = torch.tensor([[3, 4, 5, 6]])
    last = [decoder(row)[:, -1] for row in (tokens, tokens[:, [2, 0, 1, 3]])]
    assert ((last[0] - last[1]).abs().max() > 0.01) == differ
    if not differ:
        torch.testing.assert_close(last[0], last[1], rtol=0, atol=1e-5)


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


def test_loss_of_uniform_logits_is_the_log_of_the_vocabulary(plain, context):
    torch.nn.init.zeros_(plain.token_embed.weight)
    tokens = tokens_like(SEGMENTS)
    hidden = plain(tokens, SEGMENTS, context)
    total, count = token_loss(hidden, Targets.of(next_token_labels(tokens, SEGMENTS)), plain.head_parts)
    assert count == 9
    assert (total / count).item() == pytest.approx(math.log(V), rel=1e-6)


def test_a_text_is_a_product_of_its_words(plain):
    """Pr(t1 ... t5) of "Learning deep learning is fun" is Pr(t1) Pr(t2 | t1) ... Pr(t5 | t1 ... t4), five factors.

    One pass over the whole row gives all of them: what stands at a place predicts the word after it.
    """
    row = torch.tensor([[1, 5, 6, 7, 8, 9]])  # begin, and five words
    labels = next_token_labels(row, None)
    assert labels.tolist() == [[5, 6, 7, 8, 9, -100]]
    total, count = token_loss(plain(row), Targets.of(labels), plain.head_parts)
    factors = [plain.head(plain(row[:, :place])[:, -1]).softmax(-1)[0, row[0, place]] for place in range(1, 6)]
    assert count == len(factors) == 5
    torch.testing.assert_close(torch.stack(factors).prod().log(), -total, rtol=1e-5, atol=0)


def test_an_embedding_is_a_product_with_ones_and_zeros():
    """X = E W_emb: 7 ids of a sentence as rows of a single 1 each, 7 x V, times V x D."""
    ids = torch.tensor([[5, 10, 6, 30, 9, 7, 3]])
    embedding = Decoder(**SIZES).token_embed
    one_hot = torch.nn.functional.one_hot(ids[0], V).float()
    assert one_hot.shape == (7, V) and embedding.weight.shape == (V, D)
    torch.testing.assert_close(embedding(ids)[0], one_hot @ embedding.weight)


def test_the_weights_of_gpt_3():
    """96 layers of 12 x 12,288² weights, 173.9 billion; 174.6 with 50,257 tokens and 2,048 positions."""
    width, depth = 12_288, 96
    with torch.device("meta"):
        model = Decoder(vocab_size=50_257, max_len=2_048, dim=width, depth=1, num_heads=96)
    block = sum(p.numel() for p in model.blocks[0].parameters() if p.ndim > 1)
    assert block == 12 * width**2 and model.blocks[0].attn.head_dim == 128
    assert round(depth * block / 1e8) == 1739
    whole = sum(p.numel() for p in model.parameters()) + (depth - 1) * sum(
        p.numel() for p in model.blocks[0].parameters()
    )
    assert round(whole / 1e8) == 1746
