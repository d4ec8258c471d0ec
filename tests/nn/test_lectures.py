"""Exercises on attention as lectures set them, worked out by hand."""

import pytest
import torch
from torch import tensor

from vlm.nn.attention import SelfAttention, attention, attention_weights, recorded
from vlm.nn.blocks import BlockConfig
from vlm.nn.mask import as_bias, causal_tail

# "we wash our cats": the embedding of "we", and two of the three projections, d = 4 and d_k = 3.
X1 = tensor([3.0, 0.0, 1.0, -0.5])
W_Q = tensor([[1.5, 1.0, 2.0], [3.0, -2.0, 5.0], [1.0, 2.0, -2.0], [9.0, 4.0, 2.0]])
W_K = tensor([[1.0, 0.5, 2.0], [-2.0, 0.5, 3.0], [0.5, 2.0, -3.0], [5.0, 3.0, 2.0]])
LATER_KEYS = tensor([[3.0, 4.0, 3.0], [5.0, 2.0, 3.0], [3.0, 2.0, 1.0]])  # of "wash", "our", "cats"
VALUES = tensor([[1.0, 0.5, -1.0], [4.0, 5.0, -2.0], [-3.0, 2.0, 2.0], [1.0, 1.0, 6.0]])


def test_the_first_word_of_a_sentence():
    """z1 = softmax(q1 Kᵀ / √64) V, with every step below done by hand.

    q1 = x1 W^Q = 3 [1.5, 1, 2] + [1, 2, -2] - 0.5 [9, 4, 2]
       = [4.5 + 1 - 4.5, 3 + 2 - 2, 6 - 2 - 1] = [1, 3, 3]
    k1 = x1 W^K = 3 [1, 0.5, 2] + [0.5, 2, -3] - 0.5 [5, 3, 2]
       = [3 + 0.5 - 2.5, 1.5 + 2 - 1.5, 6 - 3 - 1] = [1, 2, 2]
    q1 · k1 = 1 + 6 + 6 = 13      q1 · k2 = 3 + 12 + 9 = 24
    q1 · k3 = 5 + 6 + 9 = 20      q1 · k4 = 3 + 6 + 3 = 12
    over √64: 1.625, 3, 2.5, 1.5
    exp:      5.0784, 20.0855, 12.1825, 4.4817, in sum 41.8281
    weights:  0.1214, 0.4802, 0.2913, 0.1071
    z1 = 0.1214 [1, 0.5, -1] + 0.4802 [4, 5, -2] + 0.2913 [-3, 2, 2] + 0.1071 [1, 1, 6]
       = [0.1214 + 1.9208 - 0.8738 + 0.1071, 0.0607 + 2.4010 + 0.5825 + 0.1071, -0.1214 - 0.9604 + 0.5825 + 0.6429]
       = [1.2756, 3.1513, 0.1436]
    """
    q1, k1 = X1 @ W_Q, X1 @ W_K
    assert q1.tolist() == [1, 3, 3]
    assert k1.tolist() == [1, 2, 2]
    q, k, v = q1[None, None, None], torch.cat([k1[None], LATER_KEYS])[None, None], VALUES[None, None]
    assert (q @ k.transpose(-1, -2)).flatten().tolist() == [13, 24, 20, 12]
    weights = attention_weights(q, k, scale=1 / 8).flatten()
    torch.testing.assert_close(weights, tensor([0.1214, 0.4802, 0.2913, 0.1071]), rtol=0, atol=1e-4)
    z1 = attention(q, k, v, scale=1 / 8).flatten()
    torch.testing.assert_close(z1, tensor([1.2756, 3.1513, 0.1436]), rtol=0, atol=2e-4)


def test_causally_the_first_word_sees_itself_alone():
    q = k = torch.cat([(X1 @ W_K)[None], LATER_KEYS])[None, None]
    assert attention(q, k, VALUES[None, None], mask="causal")[0, 0, 0].tolist() == VALUES[0].tolist()


def test_shapes_of_five_heads():
    """n = 2 words, d = 4, d_k = 3, H = 5: Q, K and V of a head are 2 x 3, its scores 2 x 2, all heads joined 2 x 15."""
    layer = SelfAttention(dim=4, num_heads=5, head_dim=3)
    x, seen = torch.randn(1, 2, 4), {}

    def attend(q, k, v, **options):
        seen.update(q=q, k=k, v=v)
        return attention(q, k, v, **options)

    layer.attend = attend
    assert layer(x).shape == (1, 2, 4)
    assert all(seen[name].shape == (1, 5, 2, 3) for name in "qkv")
    assert layer.qkv.weight.shape == (3 * 5 * 3, 4)
    assert layer.qkv(x).shape == (1, 2, 45)
    assert layer.proj.weight.shape == (4, 15)
    with recorded(layer) as [weights]:
        layer(x)
    assert weights[0].shape == (1, 5, 2, 2)


def test_two_large_scores():
    """102 and 99 over √3 are 58.9 and 57.2; their weights are 1 / (1 + exp(-3 / √3)) = 0.85 and 0.15.

    Without the division it would be 1 / (1 + exp(-3)) = 0.953 and 0.047: less for the second word to learn from.
    """
    q, k = tensor([[[[1.0, 10.0, 1.0]]]]), tensor([[[[1.0, 10.0, 1.0], [4.0, 9.0, 5.0]]]])
    assert (q @ k.transpose(-1, -2)).flatten().tolist() == [102, 99]
    torch.testing.assert_close(tensor([102.0, 99.0]) / 3**0.5, tensor([58.9, 57.2]), rtol=0, atol=0.05)
    torch.testing.assert_close(attention_weights(q, k).flatten(), tensor([0.85, 0.15]), rtol=0, atol=0.005)
    torch.testing.assert_close(
        attention(q, k, torch.eye(2, 3)[None, None]).flatten()[:2], tensor([0.85, 0.15]), rtol=0, atol=0.005
    )
    torch.testing.assert_close(attention_weights(q, k, scale=1.0).flatten(), tensor([0.953, 0.047]), rtol=0, atol=5e-4)


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1]])
def test_without_positions_words_in_another_order_give_the_same_in_that_order(scramble, order):
    layer = scramble(SelfAttention(dim=4, num_heads=5, head_dim=3))
    x = torch.randn(1, 4, 4)
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order], rtol=0, atol=1e-5)


def test_a_causal_mask_is_what_knows_the_order(scramble):
    layer = scramble(SelfAttention(dim=4, num_heads=5, head_dim=3))
    x, order = torch.randn(1, 4, 4), [3, 2, 1, 0]
    assert (layer(x[:, order], "causal") - layer(x, "causal")[:, order]).abs().max() > 0.01


def test_a_look_up_that_mixes_three_words():
    """A query for "orange" is like "apple" by 0.1, "banana" by 0.1 and "lemon" by 0.8: so much of each value it takes.

    Weights are 0.1, 0.1 and 0.8 where the products are their logarithms, for these have the sum 1 already.
    """
    q, k = torch.ones(1, 1, 1, 1), tensor([0.1, 0.1, 0.8]).log().view(1, 1, 3, 1)
    values = torch.eye(3)[None, None]  # pomme, banane, citron
    torch.testing.assert_close(attention_weights(q, k).flatten(), tensor([0.1, 0.1, 0.8]))
    torch.testing.assert_close(attention(q, k, values).flatten(), tensor([0.1, 0.1, 0.8]))


def test_rows_here_are_columns_there(scramble):
    """Tokens as columns: V Softmax[Kᵀ Q / √D_q] by columns is, transposed, what tokens as rows give.

    For n = 5 tokens and d = 4: Q, K and V are 4 x 5 there and 5 x 4 here; both scores are 5 x 5.
    """
    layer = scramble(SelfAttention(dim=4, num_heads=1))
    x = torch.randn(5, 4)
    weight, bias = layer.qkv.weight.split(4), layer.qkv.bias.split(4)
    q, k, v = (own @ x.T + shift[:, None] for own, shift in zip(weight, bias, strict=True))  # each 4 x 5
    weights = (k.T @ q / 4**0.5).softmax(0)  # 5 x 5, a column a query
    torch.testing.assert_close(weights.sum(0), torch.ones(5))
    columns = layer.proj.weight @ (v @ weights) + layer.proj.bias[:, None]
    with recorded(layer) as [records]:
        torch.testing.assert_close(layer(x[None])[0], columns.T)
    torch.testing.assert_close(records[0][0, 0], weights.T)


def test_each_word_sees_itself_and_what_stands_before_it():
    """The mask of "[START] The chef who", added to the 4 x 4 products: 0 where a word may look, else -inf."""
    mask = causal_tail(4, 4, torch.device("cpu"))
    assert ["".join(str(int(seen)) for seen in row) for row in mask] == ["1000", "1100", "1110", "1111"]
    inf = float("inf")
    assert as_bias(mask, torch.empty(0)).tolist() == [
        [0, -inf, -inf, -inf],
        [0, 0, -inf, -inf],
        [0, 0, 0, -inf],
        [0, 0, 0, 0],
    ]
    weights = attention_weights(*torch.randn(2, 1, 1, 4, 3), mask="causal")[0, 0]
    torch.testing.assert_close(weights.sum(1), torch.ones(4))
    assert weights[0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("width", [1, 4, 64, 512])
def test_products_grow_with_the_width_and_scaled_weights_do_not(width):
    """400 queries and 16 keys of unit normals: their products have variance D_K.

    The largest of 16 weights is 0.21 on average at D_K = 1 and 0.85 at 64 if nothing scales the products, and from 0.2
    to 0.26 at any width where √D_K divides them.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(400, 1, 1, width, generator=generator), torch.randn(400, 1, 16, width, generator=generator)
    assert (q @ k.transpose(-1, -2)).var().item() == pytest.approx(width, rel=0.2)
    scaled = attention_weights(q, k).amax(-1).mean().item()
    assert 0.2 < scaled < 0.26
    unscaled = attention_weights(q, k, scale=1.0).amax(-1).mean().item()
    assert unscaled == pytest.approx({1: 0.21, 4: 0.42, 64: 0.85, 512: 0.94}[width], abs=0.03)


def test_norm_of_each_token_by_itself():
    """x̂ = (x - μ) / σ over the d = 10 numbers of each of 20 x 5 tokens: mean 0 and variance 1, of the population."""
    x = 3 + 2 * torch.randn(20, 5, 10)
    normed = BlockConfig(dim=10, num_heads=1).make_norm()(x)
    torch.testing.assert_close(normed.mean(-1), torch.zeros(20, 5), rtol=0, atol=1e-5)
    torch.testing.assert_close(normed.var(-1, unbiased=False), torch.ones(20, 5), rtol=0, atol=1e-3)
    mean, deviation = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True).sqrt()
    torch.testing.assert_close(normed, (x - mean) / deviation, rtol=0, atol=1e-3)
