"""Shows which kernel scaled_dot_product_attention chooses on this GPU for each use in vlm, and times each kernel.

    python benchmarks/gpu/attention_kernels.py [--runs 10] [--out FILE.json]

Computes in bfloat16, forward, and also backward for uses of training. The first call of a kernel is timed separately,
because cuDNN makes a plan in it. The peak is that of a product of two 8192 x 8192 matrices.
"""

import argparse
import time
import warnings
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from device import keep, milliseconds, require_gpu
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


class Use(NamedTuple):
    """A use of attention: B rows, N heads, L queries, S keys, K width of a head."""

    rows: int
    heads: int
    queries: int
    keys: int
    width: int
    masked: bool = False
    causal: bool = False
    dropout: float = 0.0


USES = {
    "GPT-2 row": Use(64, 12, 1024, 1024, 64, causal=True),
    "GPT-2 row with documents": Use(64, 12, 1024, 1024, 64, masked=True),
    "ViT-S": Use(256, 6, 196, 196, 64),
    "packed captions": Use(64, 4, 71, 71, 64, masked=True, dropout=0.3),
    "packed captions, no dropout": Use(64, 4, 71, 71, 64, masked=True),
    "cross-attention": Use(64, 4, 71, 256, 64, dropout=0.3),
    "decode step": Use(64, 4, 1, 40, 64, masked=True),
    "decode step, cross-attention": Use(64, 4, 1, 256, 64),
}
KERNELS = {
    "default": None,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def tensor(use: Use, length: int) -> Tensor:
    shape = (use.rows, length, use.heads, use.width)
    values = torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    return values.requires_grad_(use.queries > 1)


def time_of(use: Use, kernel: SDPBackend | None, runs: int) -> tuple[float, float] | None:
    """Returns the milliseconds of a call and of the first call with one kernel; None if it does not support the use."""
    q, k, v = tensor(use, use.queries), tensor(use, use.keys), tensor(use, use.keys)
    mask = None
    if use.masked:
        mask = torch.ones(use.queries, use.keys, dtype=torch.bool, device="cuda").tril(use.keys - use.queries)
        mask = mask[None, None].expand(use.rows, 1, use.queries, use.keys)

    def attend() -> None:
        out = F.scaled_dot_product_attention(q, k, v, mask, use.dropout, use.causal)
        if use.queries > 1:
            out.backward(out.detach())

    try:
        with warnings.catch_warnings(), nullcontext() if kernel is None else sdpa_kernel(kernel):
            warnings.simplefilter("ignore")
            start = time.perf_counter()
            attend()
            torch.cuda.synchronize()
            first = time.perf_counter() - start
            return milliseconds(attend, runs=runs), 1e3 * first
    except RuntimeError:
        return None


def guess_kernel(times: dict[str, tuple[float, float] | None]) -> str:
    """Returns the kernel whose time is nearest to that of torch's own choice."""
    others = {name: pair[0] for name, pair in times.items() if pair is not None and name != "default"}
    default = times["default"]
    if default is None or not others:
        return "none"
    return min(others, key=lambda name: abs(others[name] - default[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out")
    args = parser.parse_args()
    require_gpu()
    print(torch.__version__, torch.cuda.get_device_name(), "cuDNN", torch.backends.cudnn.version())
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    print(f"peak in bfloat16: {2 * 8192**3 / milliseconds(lambda: square @ square, runs=args.runs) / 1e9:.0f} TFLOP/s")
    figures = {}
    for name, use in USES.items():
        times = {kernel: time_of(use, backend, args.runs) for kernel, backend in KERNELS.items()}
        figures[name] = {"chosen": guess_kernel(times), "times": times}
        cells = [f"{kernel} {pair[0]:.3f} ms (first {pair[1]:.0f})" for kernel, pair in times.items() if pair]
        print(f"{name:30s}{figures[name]['chosen']:10s}{'; '.join(cells)}", flush=True)
    keep(figures, args.out)


if __name__ == "__main__":
    main()
