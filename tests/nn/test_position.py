"""Positions against loops over their formulas, and Hugging Face's Llama, T5, Marian and TrOCR."""

import math

import pytest
import torch
from transformers import LlamaConfig, T5Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.trocr.modeling_trocr import TrOCRSinusoidalPositionalEmbedding

from vlm.nn.attention import SelfAttention
from vlm.nn.position import (
    BucketedBias,
    GridPositions,
    LearnedPositions,
    LearnedPositionsEachLayer,
    Positions,
    RelativeBias,
    RotaryPositions,
    SinusoidalPositions,
    SplitSinusoids,
    segment_positions,
    sincos_2d,
)


def brute_force(segments):
    positions = []
    for index, segment in enumerate(segments):
        begins = index == 0 or segments[index - 1] != segment
        positions.append(0 if begins or segment == 0 else positions[-1] + 1)
    return positions


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 1, 1, 2, 2, 3, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9]],
        [[0, 0, 0], [4, 4, 4]],  # no captions at all; one that fills the row
        [[0, 0, 1, 1, 0, 2, 2]],  # padding on the left and in the middle
        [[]],
    ],
)
def test_positions_restart_in_each_segment(rows):
    assert segment_positions(torch.tensor(rows, dtype=torch.long)).tolist() == [brute_force(row) for row in rows]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rows", ["alike", "each its own"])
def test_positions_each_layer_follow_the_lecture(scramble, kv_heads, rows):
    """(V + P) softmax((K + P)ᵀ (Q + P) / √d), a column a token, a loop a head and a query."""
    head_dim, heads, length = 3, 4, 5
    layer = scramble(SelfAttention(dim=7, num_heads=heads, head_dim=head_dim, num_kv_heads=kv_heads))
    encoding = LearnedPositionsEachLayer(head_dim=head_dim, max_len=9)
    positions = torch.arange(length) if rows == "alike" else torch.tensor([[0, 1, 2, 0, 1], [4, 5, 6, 7, 8]])
    x = torch.randn(2, length, 7)
    assert encoding.embed(positions) is None
    found = layer(x, "causal", encoding.place(positions, keys=length))
    q, k, v = layer.qkv(x).split([head_dim * heads, head_dim * kv_heads, head_dim * kv_heads], dim=-1)
    for row in range(2):
        places = encoding.weight[positions if rows == "alike" else positions[row]]
        for query in range(length):
            joined = []
            for head in range(heads):
                own, shared = (slice(at * head_dim, (at + 1) * head_dim) for at in (head, head * kv_heads // heads))
                asked = q[row, query, own] + places[query]
                products = [(k[row, key, shared] + places[key]) @ asked / head_dim**0.5 for key in range(query + 1)]
                weights = torch.stack(products).softmax(0)
                joined.append(sum(weights[key] * (v[row, key, shared] + places[key]) for key in range(query + 1)))
            torch.testing.assert_close(found[row, query], layer.proj(torch.cat(joined)), rtol=0, atol=1e-5)


def test_learned_positions_refuse_places_beyond_their_number():
    for look_up in (
        lambda: LearnedPositions(dim=4, max_len=6).embed(torch.tensor([[6]])),
        lambda: LearnedPositionsEachLayer(head_dim=4, max_len=6).place(torch.tensor([6]), keys=7),
    ):
        with pytest.raises(IndexError):
            look_up()


def test_no_positions_tell_nothing():
    layer, x = Positions(), torch.randn(2, 3, 5, 4)
    placed = layer.place(torch.arange(5), keys=5)
    assert layer.embed(torch.arange(5)) is None and placed.bias is None
    assert placed.add(x) is x and placed.rotate(x) is x
    assert not list(layer.parameters())


@pytest.mark.parametrize("dim", [2, 8, 64])
def test_sinusoidal_positions_follow_the_paper(dim):
    """PE(pos, 2i) = sin(pos / 10000^(2i / D)), PE(pos, 2i + 1) = cos(the same); over √D, as our embeddings are."""
    positions = torch.tensor([[0, 1, 2, 50], [7, 8, 999, 3]])
    found = SinusoidalPositions(dim=dim).embed(positions) * dim**0.5
    for row, column in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
        for i in range(dim // 2):
            angle = positions[row, column].item() / 10_000 ** (2 * i / dim)
            expected = torch.tensor([math.sin(angle), math.cos(angle)])
            torch.testing.assert_close(found[row, column, 2 * i : 2 * i + 2], expected, rtol=0, atol=1e-4)


def test_positions_that_need_pairs_refuse_odd_widths():
    with pytest.raises(ValueError, match="dim 7 is odd"):
        SinusoidalPositions(dim=7)
    with pytest.raises(ValueError, match="head_dim 7 is odd"):
        RotaryPositions(head_dim=7)
    with pytest.raises(ValueError, match="dim 6 is not a multiple of 4"):
        sincos_2d(3, 3, 6)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = {  # as ours, and as theirs
    "plain": ({"base": 10_000.0}, {"rope_theta": 10_000.0, "rope_type": "default"}),
    "base": ({"base": 500_000.0}, {"rope_theta": 500_000.0, "rope_type": "default"}),
    "linear": (
        {"base": 500.0, "scaling": "linear", "factor": 3.0},
        {"rope_theta": 500.0, "rope_type": "linear", "factor": 3.0},
    ),
    "llama3": (
        {"base": 500.0, "scaling": "llama3", "trained_len": 64, **LLAMA3},
        {"rope_theta": 500.0, "rope_type": "llama3", "original_max_position_embeddings": 64, **LLAMA3},
    ),
}


@pytest.mark.parametrize("rows", ["alike", "each its own"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotary_positions_equal_llama(scaling, rows):
    ours, theirs = SCALINGS[scaling]
    config = LlamaConfig(hidden_size=48, num_attention_heads=3, max_position_embeddings=512, rope_parameters=theirs)
    positions = torch.arange(300) if rows == "alike" else torch.randint(300, (2, 300))
    q, k = torch.randn(2, 3, 300, 16), torch.randn(2, 1, 300, 16)
    truth = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, positions.expand(2, 300)))
    placed = RotaryPositions(head_dim=16, **ours).place(positions, keys=300)
    for found, expected in zip((placed.rotate(q), placed.rotate(k)), truth, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=300 * 4e-6)  # the angles' own rounding
    plain = RotaryPositions(head_dim=16).place(positions, keys=300).rotate(q)
    assert ((plain - truth[0]).abs().max() > 0.5) == (scaling != "plain")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries, keys", [(6, 6), (1, 6), (2, 9)])
@pytest.mark.parametrize("max_len", [1, 4, 20])
def test_relative_bias_by_a_loop_over_offsets(scramble, causal, queries, keys, max_len):
    layer = scramble(RelativeBias(num_heads=2, max_len=max_len, causal=causal))
    assert layer.weight.shape == (2, max_len if causal else 2 * max_len - 1)
    bias = layer.place(torch.arange(keys - queries, keys), keys=keys).bias
    assert bias.shape == (2, queries, keys)
    for row in range(queries):
        for key in range(keys):
            offset = min(keys - queries + row - key, max_len - 1)
            if causal and offset < 0:
                continue  # what is not attended to
            index = offset if causal else max(offset, 1 - max_len) + max_len - 1
            assert torch.equal(bias[:, row, key], layer.weight[:, index])


@pytest.mark.parametrize(("buckets", "furthest", "causal"), [(32, 128, True), (32, 128, False), (8, 20, True)])
def test_bucketed_bias_equals_t5(buckets, furthest, causal):
    sizes = {"relative_attention_num_buckets": buckets, "relative_attention_max_distance": furthest}
    theirs = T5Attention(
        T5Config(num_heads=3, is_decoder=causal, **sizes), has_relative_attention_bias=True, layer_idx=0
    )
    ours = BucketedBias(num_heads=3, buckets=buckets, furthest=furthest, causal=causal)
    ours.weight.data.copy_(theirs.relative_attention_bias.weight.T)
    truth = theirs.compute_bias(300, 300)[0]
    assert torch.equal(ours.place(torch.arange(300), keys=300).bias, truth)
    assert torch.equal(ours.place(torch.arange(298, 300), keys=300).bias, truth[:, -2:])


def test_split_sinusoids_equal_marian_and_trocr():
    positions = torch.arange(512)
    marian = MarianSinusoidalPositionalEmbedding(512, 24).create_weight()
    torch.testing.assert_close(SplitSinusoids(dim=24).embed(positions), marian, rtol=0, atol=1e-7)
    trocr = TrOCRSinusoidalPositionalEmbedding.get_embedding(514, 24, 1)[2:]
    ours = SplitSinusoids(dim=24, base=10_000 ** (24 / 22), first=2).embed(positions)
    torch.testing.assert_close(ours, trocr, rtol=0, atol=1e-4)


def test_grid_positions_start_from_sines_of_row_and_column():
    rows, columns, dim = 3, 5, 8
    weight = GridPositions(dim=dim, grid=(rows, columns), before=1).weight
    assert weight.shape == (16, 8)
    assert not weight[0].any()
    for row, column in torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).tolist():
        frequencies = [math.pi * 100 ** (-i / 2) for i in range(2)]  # wavelengths of 2 cells to 20
        angles = [at * frequency for at in (column, row) for frequency in frequencies]
        waves = [f(angle) for half in (angles[:2], angles[2:]) for f in (math.sin, math.cos) for angle in half]
        torch.testing.assert_close(weight[1 + columns * row + column], 0.5 * torch.tensor(waves), rtol=0, atol=1e-5)
