"""Exercises on attention as lectures set them, worked out by hand."""

import pytest
import torch
from torch import tensor

from vlm.nn.attention import SelfAttention, attention, attention_weights, recorded

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
