"""The classifier's poolings against their definitions; tests/checkpoint compare it with Hugging Face's."""

import pytest
import torch
from torch import nn

from vlm.models.classifier import AttentionPool, Classifier
from vlm.models.context import Context
from vlm.models.vit import ViT

SIZES = {"image_size": 24, "patch_size": 8, "dim": 24, "depth": 2, "num_heads": 3}
POOLS = ("mean", "class", "attention", "class_mean", "distilled")


def classifier(pool="mean", num_classes=5, **options):
    tokens = {"class_token": pool in ("class", "class_mean", "distilled"), "distillation_token": pool == "distilled"}
    encoder = ViT(**SIZES | options, **tokens)
    return Classifier(encoder=encoder, num_classes=num_classes, pool=pool, pool_heads=2)


def test_attention_pool_equals_torch(scramble):
    pool = scramble(AttentionPool(dim=12, num_heads=3))
    layer = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    attn = pool.attn
    layer.load_state_dict(
        {
            "in_proj_weight": torch.cat([attn.q.weight, attn.kv.weight]),
            "in_proj_bias": torch.cat([attn.q.bias, attn.kv.bias]),
            "out_proj.weight": attn.proj.weight,
            "out_proj.bias": attn.proj.bias,
        }
    )
    states, mask = torch.randn(2, 7, 12), torch.arange(7) < torch.tensor([[7], [4]])
    query = pool.query.expand(2, 1, 12)
    truth = layer(query, states, states, key_padding_mask=~mask)[0][:, 0]
    torch.testing.assert_close(pool(states, mask), truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pool", POOLS)
def test_what_is_masked_is_not_pooled(scramble, pool):
    model = scramble(classifier(pool))
    states, mask = torch.randn(2, 7, 24), torch.arange(7) < torch.tensor([[7], [4]])
    pooled = model.pool_context(Context(states, mask))
    for row, length in enumerate((7, 4)):
        alone = model.pool_context(Context(states[row : row + 1, :length]))
        torch.testing.assert_close(pooled[row : row + 1], alone, rtol=0, atol=1e-5)


def test_mean_is_the_mean(scramble):
    states = torch.randn(2, 7, 24)
    torch.testing.assert_close(classifier().pool_context(Context(states)), sum(states.unbind(1)) / 7, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pool", POOLS)
def test_all_classes_are_equally_likely_at_first(pool):
    assert not classifier(pool)(torch.randn(2, 3, 24, 24)).any()


@pytest.mark.parametrize(
    ("pool", "token"), [("class", "class_token"), ("class_mean", "class_token"), ("distilled", "distillation_token")]
)
def test_pooling_by_a_token_needs_it(pool, token):
    with pytest.raises(ValueError, match=f"pool={pool} needs an encoder with {token}=true"):
        Classifier(encoder=ViT(**SIZES), num_classes=5, pool=pool)
