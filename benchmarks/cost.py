"""Measures how a training step's cost grows with images, captions per image, tokens, width and depth.

    python benchmarks/cost.py [--only images width] [--out FILE.json] [--plot FILE.png]

A captioner (for tokens: a language model) takes whole training steps, forward, backward, clipping and AdamW, on batches
made beforehand. Time is the median of some steps; memory is the peak of the process during them, above what it held
before the model was made. The slope on log-log axes between the three largest sizes is compared with that of the count
of operations (vlm.models.flop) over the same sizes. Results of earlier runs in the JSON file are kept.
"""

import argparse
import ctypes
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

from vlm.machine import tune

tune()  # applies to both sides

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from vlm.data.batch import Targets, next_token_labels
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.flop import Work, model_flop
from vlm.models.vit import ViT
from vlm.training.step.losses import token_loss

BASE = {"images": 16, "captions": 5, "length": 12, "dim": 128, "depth": 4}
VOCAB, IMAGE, PATCH = 2000, 96, 16
# For each sweep: what grows, its sizes, and the expected order of time and memory from small to large sizes.
SWEEPS: dict[str, tuple[str, list[int], str]] = {
    "images": ("images", [4, 8, 16, 32, 64], "time 1; memory 0 (weights) to 1"),
    "captions": ("captions an image", [1, 2, 4, 8, 16], "time 0 (the image) to 1, to 2 (attention); memory 0 to 1"),
    "tokens": ("tokens of a row (language model)", [64, 128, 256, 512, 1024], "time 1 to 2 (attention); memory 0 to 1"),
    "width": ("width", [64, 128, 256, 512], "time 1 (attention, head) to 2; memory 1 (states) to 2 (weights)"),
    "depth": ("layers of encoder and decoder", [2, 4, 8, 16], "time 0 (head) to 1; memory 0 to 1"),
}


def build(name: str, size: int) -> tuple[nn.Module, dict[str, Any], Work]:
    """Returns a model, a batch for it, and the batch as `Work`, from which operations are counted."""
    shape = dict(BASE)
    shape[{"tokens": "length", "width": "dim"}.get(name, name)] = size
    layers = {"dim": shape["dim"], "num_heads": 4, "depth": shape["depth"]}
    decoder = {"vocab_size": VOCAB, "max_len": max(64, shape["length"]), **layers}
    if name == "tokens":
        tokens = torch.randint(3, VOCAB, (4, size))
        return Decoder(**decoder), {"tokens": tokens, "segments": None}, Work(0, *tokens.shape)
    model = VisionLanguageModel(
        encoder=ViT(image_size=IMAGE, patch_size=PATCH, **layers),
        decoder=Decoder(context_dim=shape["dim"], **decoder),
    )
    tokens = torch.randint(3, VOCAB, (shape["images"], shape["captions"] * shape["length"]))
    segments = torch.arange(1, shape["captions"] + 1).repeat_interleave(shape["length"]).expand_as(tokens)
    images = torch.randn(shape["images"], 3, IMAGE, IMAGE)
    return model, {"images": images, "tokens": tokens, "segments": segments}, Work(len(images), *tokens.shape)


def step(model: nn.Module, batch: dict[str, Any], optimizer: torch.optim.Optimizer) -> int:
    """Takes one training step; returns the number of tokens in its loss."""
    targets = Targets.from_labels(next_token_labels(batch["tokens"], batch["segments"]))
    loss, count = token_loss(model(**batch), targets, model.head_parts)
    (loss / count).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return count


def measure(name: str, size: int, *, steps: int, seconds: float) -> dict[str, float]:
    """Returns time, memory and operations of a step.

    Args:
        steps: Time is the median of at most this many steps.
        seconds: Measuring stops once the steps took this long, after three steps at least.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    torch.manual_seed(0)
    model, batch, work = build(name, size)
    flop = model_flop(model, image_size=IMAGE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    counted = step(model, batch, optimizer)
    step(model, batch, optimizer)
    times: list[float] = []
    while len(times) < 3 or (len(times) < steps and sum(times) < seconds):
        start = time.perf_counter()
        step(model, batch, optimizer)
        times.append(time.perf_counter() - start)
    return {
        "size": size,
        "seconds": statistics.median(times),
        "bytes": memory("VmHWM") - before,
        "flop": flop.training(work, counted),
    }


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def slope(rows: list[dict[str, float]], key: str) -> float:
    """Returns the slope on log-log axes over the three largest sizes."""
    x, y = (np.log([row[name] for row in rows[-3:]]) for name in ("size", key))
    return float(np.polyfit(x, y, 1)[0])


def report(results: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'grows with':<34}{'time':>7}{'FLOP':>7}{'memory':>8}   expected")
    for name, rows in results.items():
        slopes = [slope(rows, key) for key in ("seconds", "flop", "bytes")]
        title, _, order = SWEEPS[name]
        print(f"{title:<34}{slopes[0]:>7.2f}{slopes[1]:>7.2f}{slopes[2]:>8.2f}   {order}")


def plot(results: dict[str, list[dict[str, float]]], path: str) -> None:
    """Draws panels of time above panels of memory; a dashed line shows growth in proportion to operations."""
    figure, axes = plt.subplots(2, len(results), figsize=(3.1 * len(results), 5.6), squeeze=False, layout="constrained")
    for column, (name, rows) in enumerate(results.items()):
        sizes = [row["size"] for row in rows]
        for axis, key, scale, unit in zip(
            axes[:, column], ("seconds", "bytes"), (1e3, 2**-20), ("ms", "MiB"), strict=True
        ):
            values = [row[key] * scale for row in rows]
            axis.loglog(sizes, values, "o-", base=2, color="#1f5fa8", label=f"measured, slope {slope(rows, key):.2f}")
            if key == "seconds":
                expected = [row["flop"] / rows[-1]["flop"] * values[-1] for row in rows]
                axis.loglog(
                    sizes, expected, "--", base=2, color="#b5651d", label=f"FLOP, slope {slope(rows, 'flop'):.2f}"
                )
            axis.set_xticks(sizes, [str(size) for size in sizes])
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_ylabel(f"{'step' if key == 'seconds' else 'memory'}, {unit}")
            axis.legend(fontsize=7)
            axis.grid(alpha=0.3)
        axes[0, column].set_title(SWEEPS[name][0], fontsize=10)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=6.0, help="a size's steps take about so long at most")
    parser.add_argument("--out")
    parser.add_argument("--plot")
    args = parser.parse_args()
    kept = json.loads(Path(args.out).read_text()) if args.out and Path(args.out).is_file() else {}
    measure("images", 2, steps=3, seconds=1.0)  # the first step also loads libraries, which must not count
    for name in args.only:
        kept[name] = [measure(name, size, steps=args.steps, seconds=args.seconds) for size in SWEEPS[name][1]]
    results = {name: kept[name] for name in SWEEPS if name in kept}
    report(results)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
