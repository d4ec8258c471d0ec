"""Parts of blocks against Hugging Face's; tests/models compare whole stacks with torch's own."""

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from vlm.models.decoder import Decoder
from vlm.nn.blocks import ACTIVATIONS, MLP, BlockConfig, DecoderBlock, DropPath

D, N, CONTEXT = 12, 3, 12


@pytest.mark.parametrize(
    ("activation", "kind", "config"), [("swiglu", LlamaMLP, LlamaConfig), ("geglu_tanh", GemmaMLP, GemmaConfig)]
)
def test_gates_equal_llamas_and_gemmas(scramble, activation, kind, config):
    theirs = scramble(kind(config(hidden_size=D, num_attention_heads=N, intermediate_size=20)))
    ours = BlockConfig(dim=D, num_heads=N, hidden_dim=20, bias=False, activation=activation).make_mlp()
    weights = theirs.state_dict()
    fc1 = torch.cat([weights["gate_proj.weight"], weights["up_proj.weight"]])
    ours.load_state_dict({"fc1.weight": fc1, "fc2.weight": weights["down_proj.weight"]})
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)


def test_swiglu_has_as_many_parameters_as_an_mlp():
    mlps = [BlockConfig(dim=48, num_heads=3, bias=False, activation=kind).make_mlp() for kind in ("gelu", "swiglu")]
    assert len({sum(parameter.numel() for parameter in mlp.parameters()) for mlp in mlps}) == 1


@pytest.mark.parametrize(
    "ours, theirs",
    [("relu", "relu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_new"), ("quick_gelu", "quick_gelu"), ("silu", "silu")],
)
def test_activations_are_hugging_faces(ours, theirs):
    x = torch.linspace(-6, 6, 200)
    torch.testing.assert_close(ACTIVATIONS[ours](x), ACT2FN[theirs](x), rtol=0, atol=1e-6)
    mlp = MLP(dim=D, hidden_dim=7, activation=ours)
    x = torch.randn(3, D)
    torch.testing.assert_close(mlp(x), mlp.fc2(ACT2FN[theirs](mlp.fc1(x))), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
@pytest.mark.parametrize(("norm", "kind"), [("rms", LlamaRMSNorm), ("rms_plus_one", GemmaRMSNorm)])
def test_rms_norms_equal_llamas_and_gemmas(scramble, norm, kind, eps, dtype):
    theirs = scramble(kind(D, eps=eps)).to(dtype)
    ours = BlockConfig(dim=D, num_heads=N, norm=norm, norm_eps=eps).make_norm()
    assert ours.weight.any() == (norm == "rms")
    ours.to(dtype).load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, D).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_block_without_bias_has_none_anywhere(norm):
    config = BlockConfig(dim=D, num_heads=N, norm=norm, bias=False, activation="swiglu")
    block = DecoderBlock(config, context_dim=CONTEXT)
    assert not [name for name, _ in block.named_parameters() if "bias" in name]
    assert isinstance(config.make_final_norm(), type(block.norm1))
    assert not list(BlockConfig(dim=D, num_heads=N, pre_norm=False).make_final_norm().parameters())


def test_drop_path_drops_whole_rows_in_training_and_keeps_the_expectation():
    x = torch.randn(1, 3, 4).expand(8000, 3, 4)
    out = DropPath(rate=0.25).train()(x)
    dropped = (out == 0).all((1, 2))
    torch.testing.assert_close(out[~dropped], x[~dropped] / 0.75)
    assert abs(dropped.float().mean() - 0.25) < 0.02
    assert torch.equal(DropPath(rate=0.9).eval()(x), x) and torch.equal(DropPath(rate=0.0).train()(x), x)


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
