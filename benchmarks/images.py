"""Compares reading photos for evaluation with torchvision's v2 on PIL images: files of 500 x 375 to 224 pixels.

    python benchmarks/images.py [--images FOLDER] [--count 200] [--rounds 9] [--out FILE.json]

One thread. Ours and the first peer end with uint8 pixels, which are later normalised on the device, a batch at a time;
the second peer is torchvision's usual pipeline, whose pixels are normalised float32. Without a folder, photos are
drawn: smooth colours with noise, at JPEG quality 90. The largest and the mean difference of pixels from the first peer
are printed, in grey levels.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from interleaved import report
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from vlm.data.images.image import Preprocess, load_image

SIDE = 224


def draw(folder: Path, count: int) -> None:
    y, x = np.mgrid[:375, :500]
    for number in range(count):
        rng = np.random.default_rng(number)
        waves = [np.sin(x / rng.uniform(5, 80)) + np.cos(y / rng.uniform(5, 80)) for _ in range(3)]
        noisy = np.stack(waves, -1) * 50 + 128 + rng.normal(0, 8, (375, 500, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{number:05}.jpg", quality=90)


def compare(paths: list[Path], rounds: int) -> dict[str, dict[str, float]]:
    shown = [v2.Resize(SIDE, InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(SIDE), v2.ToImage()]
    floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    ours, pixels, usual = Preprocess(image_size=SIDE), v2.Compose(shown), v2.Compose([*shown, *floats])
    ways: dict[str, Callable[[Path], torch.Tensor]] = {
        "ours": lambda path: ours(load_image(path)),
        "torchvision, uint8": lambda path: pixels(Image.open(path).convert("RGB")),
        "torchvision, normalised": lambda path: usual(Image.open(path).convert("RGB")),
    }
    gaps = [(ways["ours"](p).int() - ways["torchvision, uint8"](p).int()).abs() for p in paths]
    print(
        f"difference: at most {max(int(g.max()) for g in gaps)}, mean {np.mean([g.float().mean() for g in gaps]):.4f}"
    )
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            for path in paths:
                way(path)
            times[name].append((time.perf_counter() - start) / len(paths))
    results = {}
    for name in list(ways)[1:]:
        ratios = sorted(peer / own for own, peer in zip(times["ours"], times[name], strict=True))
        row = {"ours_s": float(np.median(times["ours"])), "peer_s": float(np.median(times[name]))}
        results[name] = row | {"ratio": float(np.median(ratios)), "ratio_min": ratios[0], "ratio_max": ratios[-1]}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", help="Folder of JPEGs to read instead of drawn ones.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(args.images or place)
        if args.images is None:
            draw(folder, args.count)
        report(compare(sorted(folder.glob("*.jpg"))[: args.count], args.rounds), args.out)


if __name__ == "__main__":
    main()
