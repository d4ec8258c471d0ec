"""Layouts of weights for use compute what the layers as they are compute."""

import copy

import pytest
import torch
from torch import nn

from vlm.models.context import Context, Prefix
from vlm.models.decoder import Decoder
from vlm.models.heads import VocabularyHead
from vlm.models.vit import ViT
from vlm.nn.step import packed
from vlm.nn.step.packed import PackedLinear, PackedMLP, SplitLinear, prepack, prepack_for_decoding

packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN")


@packs
@pytest.mark.parametrize("shape", [(1, 24), (8, 24), (3, 5, 24), (0, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_is_the_layer(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = nn.Linear(24, 40, bias=bias), torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(layer.weight, layer.bias)(x), layer(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 24), (24,), (1, 1, 24), (8, 24), (3, 5, 24), (0, 24)])
@pytest.mark.parametrize("outputs", [40, 41, 1])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_split_layer_is_the_layer(shape: tuple[int, ...], outputs: int, threads: int, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layer, x = nn.Linear(24, outputs, bias=outputs != 40), torch.randn(shape)
    with torch.inference_mode():
        torch.testing.assert_close(SplitLinear(layer)(x), layer(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "swiglu"])
def test_an_encoder_computes_the_same_packed(activation: str) -> None:
    torch.manual_seed(0)
    plain = ViT(
        image_size=16, patch_size=4, dim=32, depth=2, num_heads=4, activation=activation, class_token=True
    ).eval()
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    laid_out = copy.deepcopy(plain)
    prepack(laid_out)
    kinds = [type(module) for module in laid_out.modules()]
    if packs.args[0] is False:
        assert kinds.count(PackedLinear) == 2 * 4 and kinds.count(PackedMLP) == (0 if activation == "swiglu" else 2)
    images = torch.randn(3, 3, 16, 16)
    with torch.inference_mode():
        torch.testing.assert_close(laid_out(images).states, plain(images).states, rtol=0, atol=2e-5)


DECODERS = {
    "gelu": lambda: {"context_dim": 24},
    "swiglu": lambda: {"context_dim": 24, "activation": "swiglu"},
    "prefix": lambda: {"prefix": Prefix(dim=32, context_dim=24)},
    "own head": lambda: {"context_dim": 24, "vocabulary_head": VocabularyHead(dim=32, vocab_size=50, tied=False)},
    "head": lambda: {
        "context_dim": 24,
        "vocabulary_head": VocabularyHead(dim=32, vocab_size=50, bias=True, transform="gelu"),
    },
}


@pytest.mark.parametrize("plain_rows", [False, True])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("options", DECODERS)
def test_a_decoder_computes_the_same_in_any_layout(rows: int, options: str, plain_rows: bool, monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(packed, "_has_fast_row_products", lambda: plain_rows)
    plain = Decoder(vocab_size=50, max_len=8, dim=32, depth=2, num_heads=4, **DECODERS[options]()).eval()
    laid_out = copy.deepcopy(plain)
    prepack_for_decoding(laid_out, rows=rows)
    context = Context(torch.randn(rows, 6, 24), None)
    tokens = torch.randint(50, (rows, 8))
    with torch.inference_mode():
        truth = plain.head(plain(tokens, context=context))
        torch.testing.assert_close(laid_out.head(laid_out(tokens, context=context)), truth, rtol=0, atol=1e-5)
        state = laid_out.start(context, rows=rows, max_len=8)
        steps = [laid_out.head(laid_out.step(tokens[:, at : at + 1], state)) for at in range(8)]
    torch.testing.assert_close(torch.cat(steps, 1), truth, rtol=0, atol=1e-5)
