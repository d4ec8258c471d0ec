"""Layouts of weights for use compute what the layers as they are compute; layers of 8 bits do integer arithmetic."""

import copy

import pytest
import torch
from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.context import Context, Prefix
from vlm.models.decoder import Decoder
from vlm.models.heads import VocabularyHead
from vlm.models.vit import ViT
from vlm.nn.device import choose_precision
from vlm.nn.step import packed
from vlm.nn.step.frozen import FrozenLinear, FrozenMLP, fuse_frozen_layers
from vlm.nn.step.packed import (
    Int8Linear,
    PackedLinear,
    PackedMLP,
    SplitLinear,
    levels,
    prepack,
    prepack_for_decoding,
    quantize,
)

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


@pytest.mark.parametrize("trains_input", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "swiglu"])
def test_frozen_layers_compute_the_same_in_training(activation: str, trains_input: bool) -> None:
    torch.manual_seed(0)
    plain = ViT(image_size=16, patch_size=4, dim=32, depth=2, num_heads=4, activation=activation)
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    plain.requires_grad_(False)
    plain.patch_embed.requires_grad_(trains_input)
    plain.blocks[1].mlp.fc2.requires_grad_()  # a trained layer stays as it is
    plain.blocks[1].attn.proj.weight.requires_grad_()  # as does one of which a part is trained
    frozen = copy.deepcopy(plain)
    fuse_frozen_layers(frozen)
    assert list(frozen.state_dict()) == list(plain.state_dict())
    assert type(frozen.blocks[1].mlp.fc2) is type(frozen.blocks[1].attn.proj) is nn.Linear
    if packs.args[0] is False:
        kinds = [type(module) for module in frozen.modules()]
        fused = activation not in ("quick_gelu", "swiglu")
        assert (kinds.count(FrozenMLP), kinds.count(FrozenLinear)) == (fused, 6)
    images, results = torch.randn(3, 3, 16, 16), []
    for model in (plain, frozen):
        states = model(images).states
        states.square().sum().backward()
        results.append([states, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)])
    assert len(results[1]) == 4 + 2 * trains_input
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(frozen(images).states, plain(images).states)


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


# Layers of 8 bits


@pytest.fixture(params=["native", "FBGEMM"])
def products(request, monkeypatch) -> None:
    """Products of 8 bits by each of the two libraries."""
    if request.param == "FBGEMM":
        monkeypatch.setattr(packed, "load_library", lambda: None)
        packed.is_supported.cache_clear()
        if not packed.is_supported():
            pytest.skip("this build of torch has no FBGEMM")
    elif packed.load_library() is None:
        pytest.skip("there is no C++ compiler")


multiplies = pytest.mark.usefixtures("products")


def round_rows(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Integers of each row up to `most`, and the row's scale, in double precision."""
    scale = x.abs().amax(-1, keepdim=True) / most
    return (x / scale).round().double(), scale.double()


@multiplies
@pytest.mark.parametrize("shape", [(1, 24), (8, 24), (3, 5, 24), (0, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_a_product_of_integers_by_the_scales(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    weight, shift, x = torch.randn(40, 24), torch.randn(40) if bias else None, torch.randn(shape)
    (whole, of_outputs), (inputs, of_rows) = round_rows(weight, 127), round_rows(x, levels())
    truth = inputs @ whole.t() * of_rows * of_outputs[:, 0] + (0 if shift is None else shift)
    with torch.inference_mode():
        found = Int8Linear(weight, shift)(x)
    torch.testing.assert_close(found.double(), truth, rtol=0, atol=1e-5)


@multiplies
def test_a_row_is_the_same_to_the_bit_in_any_batch() -> None:
    torch.manual_seed(0)
    layer, rows = Int8Linear(torch.randn(70, 96), torch.randn(70)), torch.randn(33, 96)
    rows[5] *= 50  # a neighbour that is louder, which one scale for all would follow
    rows[7] = 0
    with torch.inference_mode():
        whole = layer(rows)
        assert all(torch.equal(layer(row[None])[0], of_batch) for row, of_batch in zip(rows, whole, strict=True))


@multiplies
def test_the_largest_sums_are_exact() -> None:
    signs = torch.tensor([1.0, -1.0])[torch.randint(2, (4, 512))]
    for x in (torch.ones(4, 512), signs):
        with torch.inference_mode():
            found = Int8Linear(x, None)(x)
        torch.testing.assert_close(found, x @ x.t(), rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("vnni", [True, False])
def test_pairs_of_products_fit_16_bits_where_they_are_added_in_16(vnni: bool, monkeypatch) -> None:
    levels.cache_clear()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_vnni": vnni})
    largest = levels() + 1 + levels()  # as FBGEMM stores it, unsigned
    levels.cache_clear()
    assert largest <= 255 and (vnni or 2 * largest * packed.WEIGHT < 2**15)


@multiplies
@pytest.mark.parametrize("head", [None, {"tied": False}, {"bias": True, "transform": "gelu"}])
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_a_decoder_of_8_bits_is_near_and_stays_so(activation: str, head: dict | None) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "max_len": 8, "dim": 64, "depth": 2, "num_heads": 4, "context_dim": 24}
    head = None if head is None else VocabularyHead(dim=64, vocab_size=50, **head)
    plain = Decoder(**sizes, activation=activation, vocabulary_head=head).eval()
    small = copy.deepcopy(plain)
    assert quantize(small, [small]) == 14 + 1
    prepack_for_decoding(small, rows=1)
    prepack_for_decoding(small, rows=8)
    kinds = [type(module) for module in small.modules()]
    assert kinds.count(Int8Linear) == 14
    context, tokens = Context(torch.randn(3, 6, 24), None), torch.randint(50, (3, 8))
    with torch.inference_mode():
        truth = plain.head(plain(tokens, context=context))
        whole = small.head(small(tokens, context=context))
        state = small.start(context, rows=3, max_len=8)
        steps = [small.head(small.step(tokens[:, at : at + 1], state)) for at in range(8)]
    assert 0 < (whole - truth).norm() < 0.03 * truth.norm()
    assert (torch.cat(steps, 1) - whole).norm() < 0.01 * truth.norm()


@multiplies
def test_an_encoder_of_8_bits_is_near() -> None:
    torch.manual_seed(0)
    plain = ViT(image_size=16, patch_size=4, dim=64, depth=2, num_heads=4).eval()
    small = copy.deepcopy(plain)
    assert quantize(small, []) == 8
    prepack(small)
    images = torch.randn(3, 3, 16, 16)
    with torch.inference_mode():
        truth, found = plain(images).states, small(images).states
    assert 0 < (found - truth).norm() < 0.03 * truth.norm()


def raise_as_on_arm(*_: object) -> None:
    raise RuntimeError("is not implemented for this packed parameter type")


def test_int8_is_refused_where_it_is_not_multiplied(monkeypatch) -> None:
    with pytest.raises(UserError, match=r"int8 on cuda.*on CPUs only; choose auto"):
        choose_precision("int8", "cuda")
    monkeypatch.setattr(packed, "quantize_weight", raise_as_on_arm)
    monkeypatch.setattr(packed, "is_supported", packed.is_supported.__wrapped__)
    with pytest.raises(UserError, match=r"int8 on cpu.*FBGEMM.*; choose auto"):
        choose_precision("int8", "cpu")
