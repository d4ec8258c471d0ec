"""Blocks against torch's own layers with the same weights."""

import pytest
import torch
from torch import nn

from vlm.models.decoder import Decoder
from vlm.nn.blocks import Block, BlockConfig, DecoderBlock, DropPath

D, N, CONTEXT = 12, 3, 12
NAMES = {  # ours -> torch's, for what both kinds of layer have
    "norm1": "norm1",
    "attn.qkv": "self_attn.in_proj_",
    "attn.proj": "self_attn.out_proj",
    "mlp.fc1": "linear1",
    "mlp.fc2": "linear2",
}


def copy_weights(block, layer, names):
    theirs = {name.replace("in_proj_", "in_proj_."): tensor for name, tensor in layer.state_dict().items()}
    ours = {f"{name}.{kind}": theirs[f"{names[name]}.{kind}"] for name in names for kind in ("weight", "bias")}
    if "cross_attn.proj" in names:
        for kind in ("weight", "bias"):
            joined = theirs[f"multihead_attn.in_proj_.{kind}"]
            ours[f"cross_attn.q.{kind}"], ours[f"cross_attn.kv.{kind}"] = joined.split([D, 2 * D])
    block.load_state_dict(ours)
    return block.eval()


def test_block_equals_torch(scramble):
    layer = scramble(nn.TransformerEncoderLayer(D, N, 4 * D, activation="gelu", batch_first=True, norm_first=True))
    block = copy_weights(Block(BlockConfig(dim=D, num_heads=N)), layer, NAMES | {"norm2": "norm2"})
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(block(x), layer(x), rtol=0, atol=1e-5)


def test_decoder_block_equals_torch(scramble):
    layer = scramble(nn.TransformerDecoderLayer(D, N, 4 * D, activation="gelu", batch_first=True, norm_first=True))
    names = {"norm_cross": "norm2", "norm2": "norm3", "cross_attn.proj": "multihead_attn.out_proj"}
    block = copy_weights(DecoderBlock(BlockConfig(dim=D, num_heads=N), context_dim=CONTEXT), layer, NAMES | names)
    x, states = torch.randn(2, 5, D), torch.randn(2, 7, CONTEXT)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    theirs = layer(x, states, tgt_mask=future, memory_key_padding_mask=~mask)
    ours = block(x, context=block.cross_attn.keys_values(states), context_mask=mask)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_drop_path_drops_whole_rows_and_keeps_the_expectation():
    x = torch.randn(1, 3, 4).expand(8000, 3, 4)
    out = DropPath(rate=0.25).train()(x)
    dropped = (out == 0).all((1, 2))
    torch.testing.assert_close(out[~dropped], x[~dropped] / 0.75)
    assert abs(dropped.float().mean() - 0.25) < 0.02
    torch.testing.assert_close(out.mean(0), x[0], rtol=0.05, atol=0.01)


def test_drop_path_does_nothing_in_evaluation():
    x = torch.randn(50, 3, 4)
    assert torch.equal(DropPath(rate=0.9).eval()(x), x)
    assert torch.equal(DropPath(rate=0.0).train()(x), x)


@pytest.mark.parametrize("context_dim, branches", [(None, 2), (64, 3)])
def test_initial_scales(context_dim, branches):
    depth = 3
    decoder = Decoder(vocab_size=99, max_len=50, dim=64, depth=depth, num_heads=4, context_dim=context_dim)
    writes = 0.0625 / (branches * depth) ** 0.5  # 0.5 / sqrt(64) is 0.0625
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones(64) if name.endswith("weight") else torch.zeros(64)), name
        elif name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        else:
            expected = writes if name.endswith(("proj.weight", "fc2.weight")) else 0.0625
            expected = 0.125 if name == "positions.weight" else expected
            assert parameter.std().item() == pytest.approx(expected, rel=0.06), name
