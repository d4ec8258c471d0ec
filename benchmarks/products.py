"""Measures the milliseconds that the linear layers of one decode step take, by the layout of their weights.

    python benchmarks/products.py [--sizes S M SmolLM2 GPT-2] [--rows 1 8] [--layouts ...] [--threads 2]

All layers of a decoder and its head run one after another, as in a step, so that caches are in the same state. Layouts
take turns; the best step of each counts, with its time by layer shape. `vlm/nn/step/packed.py` chooses by these
figures. Layouts: plain weights with torch's own product (MKL), packed ones with oneDNN, split ones with MKL's batched
product, int8 ones with activations scaled per 32 inputs, and those of native.cpp ("compiled").
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

from vlm.machine import tune

tune()

import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.nn.step.native import load_library
from vlm.nn.step.packed import FloatLinear, Int8Linear, PackedLinear, split_product

Product = Callable[[Tensor], Tensor]
Shape = tuple[int, int]  # outputs, inputs


def step(dim: int, depth: int, vocabulary: int, *others: Shape) -> list[Shape]:
    """Returns the layer shapes of a step: the head, and per block GPT-2's four unless others are given."""
    block = others or ((3 * dim, dim), (dim, dim), (4 * dim, dim), (dim, 4 * dim))
    return [*block] * depth + [(vocabulary, dim)]


SIZES = {
    "S": step(256, 6, 8000, (768, 256), (256, 256), (256, 256), (256, 256), (1024, 256), (256, 1024)),
    "M": step(384, 6, 8000, (1152, 384), (384, 384), (384, 384), (384, 384), (1536, 384), (384, 1536)),
    "SmolLM2": step(576, 30, 49152, (960, 576), (576, 576), (3072, 576), (576, 1536)),
    "GPT-2": step(768, 12, 50257),
}


def plain(weight: Tensor, bias: Tensor) -> Product:
    return lambda x: F.linear(x, weight, bias)


def in_bfloat16(weight: Tensor, bias: Tensor) -> Product:
    product = PackedLinear(weight.bfloat16(), bias.bfloat16()).function()
    return lambda x: product(x.bfloat16())


def compiled_bfloat16(weight: Tensor, bias: Tensor) -> Product:
    product = FloatLinear(weight.bfloat16(), bias.bfloat16(), load_library()).function()
    return lambda x: product(x.bfloat16())


LAYOUTS: dict[str, Callable[[Tensor, Tensor], Product]] = {
    "plain": plain,
    "packed": lambda weight, bias: PackedLinear(weight, bias).function(),
    "split": split_product,
    "bfloat16": in_bfloat16,
    "compiled": lambda weight, bias: FloatLinear(weight, bias, load_library()).function(),
    "compiled bfloat16": compiled_bfloat16,
    "int8": lambda weight, bias: Int8Linear(weight, bias).function(),
}


def time_products(products: list[tuple[Shape, Product]], inputs: dict[int, Tensor]) -> dict[Shape, float]:
    """Returns the milliseconds of a step by shape."""
    found: dict[Shape, float] = {}
    for shape, product in products:
        start = time.perf_counter()
        product(inputs[shape[1]])
        found[shape] = found.get(shape, 0.0) + 1e3 * (time.perf_counter() - start)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.sizes:
        shapes: list[Shape] = SIZES[name]
        made: dict[str, Any] = {}
        for layout in options.layouts:
            make = LAYOUTS[layout]
            made[layout] = [(shape, make(torch.randn(shape) / 32, torch.randn(shape[0]))) for shape in shapes]
        for rows in options.rows:
            inputs = {width: torch.randn(rows, width) for _, width in shapes}
            best: dict[str, dict[Shape, float]] = {}
            for _ in range(options.steps):
                for layout, products in made.items():
                    found = time_products(products, inputs)
                    best[layout] = min(found, best.get(layout, found), key=lambda one: sum(one.values()))
            for layout, found in best.items():
                parts = ", ".join(f"{a}x{b} {time:.2f}" for (a, b), time in found.items())
                print(f"{name}, rows {rows}, {layout}: {sum(found.values()):.2f} ms ({parts})", flush=True)


if __name__ == "__main__":
    main()
