"""The text encoder against Hugging Face's BERT and torch's own layers, and what must hold of it however it is built."""

import pytest
import torch
from bert import copied
from torch import nn
from transformers import BertConfig, BertModel

from vlm.models.text_encoder import TextEncoder
from vlm.nn.bucketed_bias import BucketedBias
from vlm.nn.mask import within
from vlm.nn.position import (
    LearnedPositionsEachLayer,
    Positions,
    RelativeBias,
    RotaryPositions,
    SinusoidalPositions,
    SplitSinusoids,
)
from vlm.nn.spelling import Spelling

V, MAX_LEN, D, DEPTH, N = 31, 12, 24, 2, 3
SIZES = {"vocab_size": V, "max_len": MAX_LEN, "dim": D, "depth": DEPTH, "num_heads": N}
BERT = {"pre_norm": False, "embed_norm": True, "token_types": 2, "norm_eps": 1e-12}
VARIANTS = {
    "bert": lambda: BERT,
    "learned": dict,
    "each_layer": lambda: {"positions": LearnedPositionsEachLayer(head_dim=D // N, max_len=MAX_LEN)},
    "rotary": lambda: {"positions": RotaryPositions(head_dim=D // N), "norm": "rms", "activation": "swiglu"},
    "relative": lambda: {"positions": RelativeBias(num_heads=N, max_len=4, causal=False)},
    "sinusoidal": lambda: {"positions": SinusoidalPositions(dim=D), "token_types": 3},
    "marian": lambda: {"positions": SplitSinusoids(dim=D), "embed_scale": D**0.5, "pre_norm": False},
    "t5": lambda: {"positions": BucketedBias(num_heads=N, buckets=8, furthest=5, causal=False), "attn_scale": 1.0},
    "no_positions": lambda: {"positions": Positions()},
    "spelling": lambda: {"spelling": spelling()},
}


def spelling():
    layer = Spelling(vocab_size=V, dim=D, width=8, byte_dim=4)
    layer.learn([b"" if id < 3 else f"{' ' * (id % 2)}{id}".encode() for id in range(V)])
    return layer


# Two rows: texts of 4, 2 and 3 tokens with 3 of padding, and one of 12.
SEGMENTS = torch.tensor([[1, 1, 1, 1, 2, 2, 3, 3, 3, 0, 0, 0], [1] * 12])


@pytest.fixture(params=VARIANTS)
def encoder(request, scramble):
    return scramble(TextEncoder(**SIZES | VARIANTS[request.param]()))


@pytest.fixture
def tokens():
    return torch.randint(V, SEGMENTS.shape)


@pytest.fixture
def types(encoder):
    return None if encoder.type_embed is None else torch.randint(2, SEGMENTS.shape)


def texts(rows):
    """The values of each text of SEGMENTS."""
    return [row[own == n] for row, own in zip(rows, SEGMENTS, strict=True) for n in range(1, 4) if (own == n).any()]


def bert(scramble, **options):
    sizes = {"vocab_size": V, "max_position_embeddings": MAX_LEN, "hidden_size": D, "num_hidden_layers": DEPTH}
    sizes |= {"num_attention_heads": N, "intermediate_size": 4 * D, "type_vocab_size": 2}
    return scramble(BertModel(BertConfig(**sizes, **options)))


def test_equals_bert(scramble, tokens):
    theirs = bert(scramble)
    ours = copied(TextEncoder(**SIZES, **BERT), theirs)
    types, seen = torch.randint(2, tokens.shape), torch.arange(12) < torch.tensor([[7], [12]])
    truth = theirs(tokens, attention_mask=seen.long(), token_type_ids=types).last_hidden_state
    context = ours(tokens, seen.long(), types)
    assert torch.equal(context.mask, seen)
    torch.testing.assert_close(context.states[seen], truth[seen], rtol=0, atol=1e-5)
    truth = theirs(tokens).last_hidden_state  # no padding, all of type 0
    context = ours(tokens)
    assert context.mask is None
    torch.testing.assert_close(context.states, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pre_norm", [True, False])
def test_equals_torch(scramble, tokens, pre_norm):
    layer = nn.TransformerEncoderLayer(D, N, 4 * D, dropout=0.0, batch_first=True, norm_first=pre_norm)
    last = nn.LayerNorm(D) if pre_norm else None
    theirs = scramble(nn.TransformerEncoder(layer, DEPTH, last, enable_nested_tensor=False))
    ours = scramble(TextEncoder(**SIZES, pre_norm=pre_norm, activation="relu"))
    names = {"self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj": "attn.proj", "linear": "mlp.fc"}
    state = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        state[name.replace("layers.", "blocks.")] = tensor
    own = {name: tensor for name, tensor in ours.state_dict().items() if name.startswith(("token", "positions"))}
    ours.load_state_dict(state | own)
    padding = SEGMENTS == 0
    embedded = ours.token_embed(tokens) + ours.positions.weight
    truth = theirs(embedded, src_key_padding_mask=padding)
    found = ours(tokens, (~padding).long()).states
    torch.testing.assert_close(found[~padding], truth[~padding], rtol=0, atol=1e-5)


def test_packed_texts_equal_each_alone(encoder, tokens, types):
    packed = encoder(tokens, SEGMENTS, types)
    assert torch.equal(packed.mask, SEGMENTS != 0)
    own = texts(tokens) if types is None else texts(torch.stack([tokens, types], -1))
    for text, states in zip(own, texts(packed.states), strict=True):
        alone = encoder(text[None]) if types is None else encoder(text[None, :, 0], None, text[None, :, 1])
        torch.testing.assert_close(states, alone.states[0], rtol=0, atol=1e-5)


def test_a_token_is_seen_from_both_sides_and_in_its_own_text_alone(encoder, tokens, types):
    other = tokens.clone()
    other[0, 5] = (tokens[0, 5] + 1) % V  # the last token of the second text
    change = (encoder(tokens, SEGMENTS, types).states - encoder(other, SEGMENTS, types).states).abs().amax(-1)
    assert (change[0, 4:6] > 1e-3).all()
    assert change[0, :4].max() < 1e-5 and change[0, 6:9].max() < 1e-5 and change[1].max() < 1e-5


def test_token_dropout_leaves_positions_alone_of_some_tokens_in_training(tokens):
    encoder = TextEncoder(**SIZES, token_dropout=0.5)
    places = torch.arange(tokens.shape[1])
    whole = encoder.token_embed(tokens) + encoder.positions.weight
    torch.manual_seed(0)
    found = encoder.embed(tokens, places, None)
    kept, gone = (found == whole).all(-1), (found == encoder.positions.weight).all(-1)
    assert (kept ^ gone).all() and 4 <= gone.sum() <= 20  # of 24
    assert torch.equal(encoder.eval().embed(tokens, places, None), whole)


def test_every_parameter_gets_a_gradient(encoder, tokens, types):
    encoder(tokens, SEGMENTS, types).states[SEGMENTS != 0].square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_without_positions_a_permuted_text_gives_permuted_states(scramble, tokens):
    """f[t[x]] = t[f[x]]: attention without positions sees a bag of words, and with a causal mask it does not."""
    encoder = scramble(TextEncoder(**SIZES, positions=Positions()))
    order = torch.randperm(12)
    torch.testing.assert_close(encoder(tokens[:, order]).states, encoder(tokens).states[:, order], rtol=0, atol=1e-5)


def test_the_mask_of_two_texts_and_padding():
    """Drawn as rows of digits: a 1 where the token of the row attends to that of the column."""
    mask = within(torch.tensor([[1, 1, 1, 2, 2, 0]]))[0, 0]
    rows = ["".join(str(int(seen)) for seen in row) for row in mask]
    assert rows == ["111000", "111000", "111000", "000110", "000110", "000001"]


def test_the_weights_of_bert_large():
    """24 layers of 12,596,224 weights, of width 1024; 333.0 million with 30,000 words, 334.6 with all embeddings."""
    with torch.device("meta"):
        sizes = {"vocab_size": 30_000, "max_len": 512, "dim": 1024, "num_heads": 16}
        encoder = TextEncoder(**sizes, depth=24, **BERT)
    assert sum(p.numel() for p in encoder.blocks[0].parameters()) == 12_596_224
    pooler = 1024 * 1025
    assert round((sum(p.numel() for p in encoder.parameters()) + pooler) / 1e5) == 3346
    assert encoder.blocks[0].attn.head_dim == 64
