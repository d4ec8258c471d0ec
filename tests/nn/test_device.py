"""What the machine is said to compute in is what its processor lists."""

import copy
import platform
from pathlib import Path

import pytest
import torch
from torch import nn

from vlm.models.context import Context
from vlm.models.decoder import Decoder
from vlm.nn.attention import attention
from vlm.nn.device import has_bfloat16, widest_float
from vlm.nn.position import LearnedPositionsEachLayer, RelativeBias, RotaryPositions, SinusoidalPositions
from vlm.nn.step.packed import prepack_for_decoding

LENGTH, DIM, HEADS = 9, 32, 4


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags have other names on other processors")
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux lists them there")
def test_bfloat16_is_known_by_the_flags_of_the_processor():
    words = set(Path("/proc/cpuinfo").read_text().split())
    assert has_bfloat16("cpu") == ("amx_bf16" in words or {"avx512_bf16", "AuthenticAMD"} <= words)


@pytest.mark.parametrize(
    ("processor", "fast"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, True),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": False}, False),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": True, "amx_bf16": False}, True),
        ({"cpu_name": "AMD EPYC", "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "aarch64"}, False),
    ],
)
def test_bfloat16_is_fast_by_amx_and_on_amds_processors(monkeypatch, processor, fast):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: processor)
    assert has_bfloat16("cpu") is fast


def test_apples_devices_have_neither_float64_nor_fast_bfloat16():
    assert widest_float("mps") == torch.float32
    assert widest_float("cuda") == widest_float("cpu") == torch.float64
    assert not has_bfloat16("mps")


@pytest.mark.parametrize("masked", [False, True])
def test_plain_products_in_bfloat16_are_attention(masked):
    torch.manual_seed(0)
    given = [torch.randn(4, 8, 70, 16).bfloat16() for _ in range(3)]
    seen = "causal" if masked else None
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v = (x.to(dtype).requires_grad_() for x in given)
        out = attention(q, k, v, mask=seen)
        out.float().pow(2).sum().backward()
        found.append([out.double(), *(x.grad.double() for x in (q, k, v))])
    for truth, low in zip(*found, strict=True):
        assert (low - truth).norm() < 0.01 * truth.norm()


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    "positions",
    [
        None,
        SinusoidalPositions(dim=DIM),
        LearnedPositionsEachLayer(head_dim=DIM // HEADS, max_len=LENGTH),
        RotaryPositions(head_dim=DIM // HEADS),
        RelativeBias(num_heads=HEADS, max_len=LENGTH),
    ],
)
def test_a_decoder_in_bfloat16_decodes_what_it_would_in_float32(positions: nn.Module | None, rows: int) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "max_len": LENGTH, "dim": DIM, "depth": 2, "num_heads": HEADS, "context_dim": 24}
    decoder = Decoder(**sizes, positions=copy.deepcopy(positions)).eval()
    context, tokens = Context(torch.randn(rows, 6, 24), None), torch.randint(50, (rows, LENGTH))
    with torch.inference_mode():
        truth = decoder.head(decoder(tokens, context=context))
        decoder.bfloat16()
        prepack_for_decoding(decoder, rows=rows)
        state = decoder.start(Context(context.states.bfloat16(), None), rows=rows, max_len=LENGTH)
        steps = [decoder.head(decoder.step(tokens[:, at : at + 1], state)) for at in range(LENGTH)]
    assert steps[0].dtype == torch.bfloat16
    assert (torch.cat(steps, 1).float() - truth).norm() < 0.02 * truth.norm()
