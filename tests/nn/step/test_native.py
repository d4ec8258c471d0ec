"""Products and decode steps in C++ equal those of torch's operators."""

import copy
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.models.context import Context, Prefix
from vlm.models.decoder import Decoder
from vlm.nn.attention import record_attention
from vlm.nn.position import BucketedBias, LearnedPositionsEachLayer, RotaryPositions
from vlm.nn.step import native, packed
from vlm.nn.step.native import NativeLinear, compile_library, load_library
from vlm.nn.step.packed import Int8Linear, levels, prepack_for_decoding, quantize, quantize_weight

BLOCK = 32  # inputs that share a scale
pytestmark = pytest.mark.skipif(load_library() is None, reason="there is no C++ compiler with OpenMP")


def decode_steps(decoder: Decoder, tokens: Tensor, context: Context | None, **options) -> Tensor:
    """The logits after each token, decoded one by one."""
    with torch.inference_mode():
        state = decoder.start(context, rows=len(tokens), max_len=options.pop("max_len", 12), **options)
        steps = [decoder.head(decoder.step(tokens[:, at : at + 1], state)) for at in range(tokens.shape[1])]
    return torch.cat(steps, 1)


def both_ways(decoder: Decoder, monkeypatch, *arguments, **options) -> tuple[Tensor, Tensor]:
    """Steps in C++, and the same with the blocks of torch's operators."""
    called = []
    step = native.NativeBlocks.step
    with monkeypatch.context() as patch:
        patch.setattr(native.NativeBlocks, "step", lambda *args: called.append(1) or step(*args))
        found = decode_steps(decoder, *arguments, **options)
    assert called
    with monkeypatch.context() as patch:
        patch.setattr(native.NativeBlocks, "is_supported", lambda block: False)
        return found, decode_steps(decoder, *arguments, **options)


def assert_near(found: Tensor, truth: Tensor, largest: float = 0.02) -> None:
    """Compares logits (rows, steps, V).

    Rounding differs in the last bit. Where an input in 8 bits lies between two integers, it then becomes the other one,
    and later steps of the row differ by that too; most steps must not.
    """
    errors = (found - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert errors.median() < 1e-5 and errors.max() < largest
    assert len({tuple(row) for row in found[:, -1].tolist()}) == len(found)  # inputs have an effect


def make_decoder(weights: str = "int8", **options) -> Decoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "max_len": 40, "dim": 48, "depth": 2, "num_heads": 4}
    decoder = Decoder(**(sizes | options)).eval()
    for parameter in decoder.parameters():  # biases and scales that are not 0 and 1
        parameter.data += 0.1 * torch.randn_like(parameter)
    if weights == "int8":
        quantize(decoder, [decoder])
    else:
        prepack_for_decoding(decoder, rows=2)
    return decoder


BLOCKS = {
    "GPT-2": {"activation": "gelu_tanh"},
    "Llama": {"activation": "swiglu", "norm": "rms", "bias": False, "num_kv_heads": 2, "hidden_dim": 64},
    "Gemma": {"activation": "geglu_tanh", "norm": "rms_plus_one", "bias": False, "num_kv_heads": 1, "hidden_dim": 80},
    "Qwen": {"activation": "swiglu", "norm": "rms", "qk_norm": "rms", "head_dim": 20, "qkv_bias": True},
    "cosines": {"qk_norm": True, "activation": "gelu"},
    "OPT": {"activation": "relu", "attn_scale": 0.3, "hidden_dim": 37, "dim": 36},
    "CLIP": {"activation": "quick_gelu", "num_heads": 3},
    "silu": {"activation": "silu"},
}


@pytest.mark.parametrize("weights", ["int8", "float32"])
@pytest.mark.parametrize("positions", ["learned", "rotary", "bias"])
@pytest.mark.parametrize("block", BLOCKS)
def test_steps_equal_those_of_operators(block: str, positions: str, weights: str, monkeypatch) -> None:
    options = dict(BLOCKS[block])
    heads = options.get("num_heads", 4)
    head_dim = options.get("head_dim") or options.get("dim", 48) // heads
    if positions == "rotary" and head_dim % 2 == 0:
        options["positions"] = RotaryPositions(head_dim=head_dim)
    if positions == "bias":
        options["positions"] = BucketedBias(num_heads=heads, buckets=8, furthest=20)
    decoder = make_decoder(weights, **options)
    found, truth = both_ways(decoder, monkeypatch, torch.randint(50, (3, 12)), None)
    assert_near(found, truth, 0.02 if weights == "int8" else 1e-5)


@pytest.mark.parametrize("block", ["GPT-2", "Llama"])
def test_steps_in_bfloat16_are_nearer_to_float32_than_those_of_operators(block: str, monkeypatch) -> None:
    monkeypatch.setattr(packed, "_is_native_fast", lambda dtype: True)  # on processors with AMX too
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "max_len": 12, "dim": 48, "depth": 2, "num_heads": 4}
    exact = Decoder(**(sizes | BLOCKS[block])).eval().bfloat16().float()
    low, tokens = copy.deepcopy(exact).bfloat16(), torch.randint(50, (3, 12))
    truth, plain = decode_steps(exact, tokens, None), decode_steps(copy.deepcopy(low), tokens, None)
    prepack_for_decoding(low, rows=2)
    assert low.start(None, rows=3, max_len=12).native is not None
    found = decode_steps(low, tokens, None)
    assert found.dtype == torch.bfloat16
    assert (found.float() - truth).norm() < min(0.01 * truth.norm(), (plain.float() - truth).norm())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["cross", "prefix"])
def test_steps_attend_to_context(kind: str, masked: bool, monkeypatch) -> None:
    states = torch.randn(3, 6, 24)
    mask = torch.arange(6) < torch.tensor([[2], [6], [4]]) if masked else None
    options = {"context_dim": 24} if kind == "cross" else {"prefix": Prefix(dim=48, context_dim=24)}
    decoder = make_decoder(qk_norm=True, num_kv_heads=2, **options)
    context = Context(states, mask)
    found, truth = both_ways(decoder, monkeypatch, torch.randint(50, (3, 9)), context)
    assert_near(found, truth)
    other = decode_steps(decoder, torch.randint(50, (3, 9)), Context(states.flip(1), mask))
    assert (other - truth).norm() > 1e-2 * truth.norm()


def test_rows_may_begin_at_any_step_and_old_slots_are_overwritten(monkeypatch) -> None:
    decoder = make_decoder(positions=RotaryPositions(head_dim=12))
    starts = torch.tensor([0, 3, 5])
    found, truth = both_ways(decoder, monkeypatch, torch.randint(50, (3, 17)), None, starts=starts, max_len=8)
    assert_near(found, truth)


def test_a_text_does_not_depend_on_the_texts_beside_it() -> None:
    decoder, tokens = make_decoder(), torch.randint(50, (13, 12))
    whole = decode_steps(decoder, tokens, None)
    for row in (0, 5, 12):
        assert torch.equal(decode_steps(decoder, tokens[row : row + 1], None)[0], whole[row])


def test_what_is_not_supported_runs_by_operators() -> None:
    tokens = torch.randint(50, (2, 5))
    state = make_decoder(pre_norm=False).start(None, rows=2, max_len=5)
    assert state.native is None
    state = make_decoder().start(None, rows=4, max_len=5, beams=2)
    assert state.native is None
    state = make_decoder(hidden_dim=40, activation="swiglu").start(None, rows=2, max_len=5)
    assert state.native is None  # gates and values do not begin at a group of outputs
    added = make_decoder(positions=LearnedPositionsEachLayer(head_dim=12, max_len=40))
    assert decode_steps(added, tokens, None).isfinite().all()
    decoder = make_decoder()
    with record_attention(decoder.blocks[0].attn) as [records]:
        decode_steps(decoder, tokens, None)
    assert len(records) == 5


@pytest.mark.parametrize("flags", [[], ["-mno-avx512f"], ["-mno-avx512f", "-mno-avx2"]])
@pytest.mark.parametrize("shape", [(64, 48), (37, 23), (1, 5), (130, 1)])
def test_products_are_exact_with_every_set_of_instructions(flags: list[str], shape: tuple[int, int]) -> None:
    if flags and not torch.cpu.get_capabilities().get("avx2"):
        pytest.skip("flags of x86 processors with AVX2")
    library = native.open_library(compile_library(flags))
    torch.manual_seed(0)
    most = 63 if flags else levels()  # what processors without VNNI use
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    quantized, parts = quantize_weight(weight), map(quantize_weight, weight.split(2 * native.GROUP))
    layer = NativeLinear(parts, torch.qint8, *shape, bias, most, library)
    for rows in (0, 1, 2, 5, 6, 15):
        x = torch.randn(rows, shape[1])
        x[rows // 2 :, ::5] *= 100
        blocks = F.pad(x, (0, -shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
        scale = blocks.abs().amax(2, keepdim=True).clamp_min(1e-30) / most
        rounded = ((blocks / scale).round().double() * scale).flatten(1)[:, : shape[1]]
        truth = rounded @ quantized.dequantize().double().t() + bias
        torch.testing.assert_close(layer.multiply(x).double(), truth, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("flags", [[], ["-mno-avx512bf16"], ["-mno-avx512f"], ["-mno-avx512f", "-mno-avx2"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 48), (37, 23), (1, 5), (130, 1)])
def test_float_products_equal_those_in_double_precision(dtype, shape: tuple[int, int], flags: list[str]) -> None:
    if flags and not torch.cpu.get_capabilities().get("avx2"):
        pytest.skip("flags of x86 processors with AVX2")
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    layer = NativeLinear.from_floats(weight, bias, native.open_library(compile_library(flags)))
    whole = torch.randn(15, shape[1]).to(dtype)
    for rows in (0, 1, 2, 5, 6, 15):
        found = layer.multiply(whole[:rows])
        truth = whole[:rows].double() @ weight.double().t() + bias.double()
        torch.testing.assert_close(
            found.double(), truth.to(dtype).double(), rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5
        )
        assert found.dtype == dtype and torch.equal(found, layer.multiply(whole)[:rows])


def test_without_a_compiler_fbgemm_multiplies(monkeypatch, tmp_path, caplog) -> None:
    load_library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    try:
        with caplog.at_level(logging.DEBUG), torch.inference_mode():
            layer = Int8Linear(torch.eye(8), None)
            assert load_library() is None and layer.native is None
            torch.testing.assert_close(layer(torch.eye(8)), torch.eye(8))
    finally:
        load_library.cache_clear()
    assert "not compiled" in caplog.text


def test_a_library_is_compiled_once(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: runs.append(args) or run(*args, **options))
    assert compile_library() == compile_library()
    assert len(runs) == 1
    assert [path.suffix for path in (tmp_path / "vlm").iterdir()] == [".so"]
    assert compile_library(["-O2"]) != compile_library()


def test_threads_are_those_of_torch() -> None:
    """sentencepiece brings an OpenMP library too, whose threads would compete with torch's."""
    maps = Path("/proc/self/maps").read_text()
    folder = str(Path(torch.__file__).parent)
    if f"{folder}/lib/libgomp" not in maps:
        pytest.skip("this torch has no OpenMP library of its own")
    code = "import sentencepiece; from vlm.nn.step.native import compile_library; print(compile_library())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(compile_library())  # its name depends on the OpenMP library
    assert native._loaded_openmp()[0].startswith(folder)
