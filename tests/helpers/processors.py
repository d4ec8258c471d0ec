"""Processors that this machine may not have: what torch says of them, and which weights oneDNN packs on them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vlm.nn.step import packed

# What torch lists of a processor, and the types of weights that oneDNN packs there.
PROCESSORS: dict[str, tuple[dict[str, Any], set[torch.dtype]]] = {
    "AVX2": ({"cpu_name": "AMD EPYC", "avx2": True}, {torch.float32}),
    "AVX-512": ({"cpu_name": "Intel Xeon", "avx2": True, "avx512_f": True}, {torch.float32, torch.bfloat16}),
    "AVX512-BF16 of Intel": ({"cpu_name": "Intel Xeon", "avx512_bf16": True}, {torch.float32, torch.bfloat16}),
    "AVX512-BF16 of AMD": ({"cpu_name": "AMD EPYC", "avx512_bf16": True}, {torch.float32, torch.bfloat16}),
    "AMX": ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, {torch.float32, torch.bfloat16}),
    "ARM": ({"architecture": "aarch64"}, {torch.float32}),
    "no oneDNN": ({}, set()),
}
FAST_BFLOAT16 = {"AVX512-BF16 of AMD", "AMX"}
ACTIVATIONS = {"none": lambda x: x, "relu": torch.relu, "gelu": torch.nn.functional.gelu}


def pretend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Has torch tell of another processor, and its packing take and refuse what it does there.

    What is packed is then multiplied by plain layers: the values are those of any processor.
    """
    known, packs = PROCESSORS[name]

    def reorder(weight: Tensor, rows: int) -> Tensor:
        if weight.dtype not in packs:
            raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support")
        return weight

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, scalars: list, kind: str) -> Tensor:
        out = torch.nn.functional.linear(x, weight, bias)
        return torch.nn.functional.gelu(out, approximate=kind) if activation == "gelu" else ACTIVATIONS[activation](out)

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: bool(packs))
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", reorder)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", SimpleNamespace(default=product))
    packed.packs.cache_clear()
