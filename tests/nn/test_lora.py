"""Adapters of low rank, by the formula of the paper."""

import pytest
import torch
from torch import nn

from vlm.nn.blocks import BlockConfig, DecoderBlock
from vlm.nn.lora import LoRA, merge_adapters


def adapt_block(block, **changes):
    lora = LoRA(**{"rank": 3, "alpha": 6, "projections": ["qkv", "cross_attn.q"]} | changes)
    return lora, lora.adapt(block)


@pytest.fixture
def block():
    torch.manual_seed(0)
    return DecoderBlock(BlockConfig(dim=12, num_heads=3), context_dim=8).eval()


def test_nothing_changes_at_the_start(block):
    x, states = torch.randn(2, 5, 12), torch.randn(2, 4, 8)
    before, names = block(x, context=block.keys_values(states)), set(block.state_dict())
    assert adapt_block(block)[1] == 2
    assert torch.equal(block(x, context=block.keys_values(states)), before)
    assert names < set(block.state_dict())


def test_a_layer_computes_the_formula_and_so_do_merged_weights(block):
    weight, bias = block.attn.qkv.weight.clone(), block.attn.qkv.bias.clone()
    lora, _ = adapt_block(block)
    layer, x = block.attn.qkv, torch.randn(2, 5, 12)
    nn.init.normal_(layer.lora_b)
    whole = weight + 6 / 3 * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(layer(x), x @ whole.T + bias, rtol=1e-6, atol=1e-5)
    merged = merge_adapters(block.state_dict(), lora.scale)
    torch.testing.assert_close(merged["attn.qkv.weight"], whole, rtol=1e-6, atol=1e-6)
    plain = DecoderBlock(BlockConfig(dim=12, num_heads=3), context_dim=8).eval()
    plain.load_state_dict(merged)
    torch.testing.assert_close(plain(x), block(x), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("projections", "without", "names"),
    [
        (["proj"], [], ["attn.proj", "cross_attn.proj"]),
        (["attn.proj"], [], ["attn.proj"]),
        (["mlp.*", "*.kv"], [], ["mlp.fc1", "mlp.fc2", "cross_attn.kv"]),
        (["qkv", "kv"], ["cross_attn"], ["attn.qkv"]),
        (["v", "norm1", "mlp"], [], []),
    ],
)
def test_layers_go_by_the_ends_of_their_names(block, projections, without, names):
    lora = LoRA(rank=1, alpha=1, projections=projections)
    assert sorted(name for name, _ in lora.layers(block, without)) == sorted(names)
