"""Compares captions a second from image files with pretrained models with `generate` of `transformers`.

    python benchmarks/pretrained.py [vit_gpt2 blip_base] [--photos 64] [--batch 8] [--tokens 20] [--rounds 3]

Models have the published sizes and random weights, in a folder that `transformers` saved and both sides read. Photos of
mixed sizes are drawn and stored as JPEG. Each measurement runs in its own process, which loads the folder, captions one
photo, and then all of them, by greedy search and with four beams. Sides take turns, and ratios are medians over rounds.
All texts have the same number of tokens. One line per model and search: captions a second of each side, from files to
texts. Then: seconds from the start of the process to its first caption, and its peak memory.

    theirs fp32, theirs bf16    as its documentation says: AutoImageProcessor, generate in batches, batch_decode
    ours fp32, ours             vlm.load and caption, in float32 and in its default precision
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIDES = {"theirs fp32": "float32", "theirs bf16": "bfloat16", "ours fp32": "fp32", "ours": "auto"}
REFERENCE = "theirs fp32"
BEAMS = (1, 4)
NAMES = ("vit_gpt2", "blip_base")
Captions = Callable[[list[str], int], list[str]]  # (paths, beams) -> captions


def make(name: str, folder: Path, count: int) -> None:
    """Saves a model, and draws photos: gradients with noise, portrait and landscape, of 0.1 to 2 million pixels."""
    import numpy as np
    import torch
    from PIL import Image
    from pretrained_equality import MODELS, even_out

    torch.manual_seed(0)
    model, *others = MODELS[name]()
    even_out(model)
    for part in (model, *others):
        part.save_pretrained(folder / "model")
    (folder / "photos").mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        width, height = (int(side) for side in random.integers(300, 1500, 2))
        x, y = np.linspace(0, 1, width)[None, :, None], np.linspace(0, 1, height)[:, None, None]
        corners = random.uniform(0, 255, (3, 3))
        pixels = corners[0] * (1 - x) + corners[1] * x * (1 - y) + corners[2] * x * y
        pixels = pixels + random.normal(0, 12, (height, width, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / "photos" / f"{number:03}.jpg", quality=90)


def theirs(folder: Path, dtype: str, batch: int, tokens: int) -> Captions:
    """Returns a captioner of `transformers`."""
    import torch
    import transformers as t
    from PIL import Image

    place = str(folder / "model")
    kind = getattr(t, json.loads((folder / "model" / "config.json").read_text())["architectures"][0])
    model = kind.from_pretrained(place, dtype=getattr(torch, dtype)).eval()
    processor, tokenizer = t.AutoImageProcessor.from_pretrained(place), t.AutoTokenizer.from_pretrained(place)

    @torch.inference_mode()
    def captions(paths: list[str], beams: int) -> list[str]:
        texts: list[str] = []
        for start in range(0, len(paths), batch):
            images = [Image.open(path).convert("RGB") for path in paths[start : start + batch]]
            pixels = processor(images, return_tensors="pt").pixel_values.to(model.dtype)
            ids = model.generate(
                pixel_values=pixels, num_beams=beams, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False
            )
            texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
        return texts

    return captions


def ours(folder: Path, precision: str, batch: int, tokens: int) -> Captions:
    """Returns a captioner of vlm."""
    import vlm

    model = vlm.load(folder / "model", device="cpu", precision=precision)
    options: dict[str, Any] = {"min_tokens": tokens, "max_tokens": tokens, "batch_size": batch}
    return lambda paths, beams: [one.text for one in model.caption(paths, beam=beams, **options)]


def measure(side: str, folder: Path, batch: int, tokens: int, started: float) -> dict[str, Any]:
    """Returns the figures of one process; `started` is its start by the system's clock."""
    captions = (ours if side.startswith("ours") else theirs)(folder, SIDES[side], batch, tokens)
    paths = sorted(str(path) for path in (folder / "photos").iterdir())
    captions(paths[:1], 1)
    figures: dict[str, Any] = {"first": time.time() - started}
    for beams in BEAMS:
        begun = time.perf_counter()
        texts = captions(paths, beams)
        figures[f"beam {beams}"] = {"rate": len(paths) / (time.perf_counter() - begun), "texts": texts}
    return figures | {"memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # GiB


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs all sides of a model in turns, and prints and returns its results."""
    with tempfile.TemporaryDirectory() as folder:
        make(name, Path(folder), options.photos)
        rounds: list[dict[str, Any]] = []
        for _ in range(options.rounds):
            rounds.append({side: in_process(side, folder, options) for side in SIDES})
    results: dict[str, Any] = {}
    for beams in BEAMS:
        rates = {side: [one[side][f"beam {beams}"]["rate"] for one in rounds] for side in SIDES}
        results[f"beam {beams}"] = show(f"{name}, {beams} {'beams' if beams > 1 else 'beam'}, captions/s", rates)
        texts = {side: rounds[0][side][f"beam {beams}"]["texts"] for side in (REFERENCE, "ours fp32")}
        same = sum(a == b for a, b in zip(*texts.values(), strict=True))
        print(f"    in fp32 {same} of {options.photos} texts are equal", flush=True)
    for key, unit in (("first", "s to the first caption"), ("memory", "GiB")):
        results[key] = show(f"{name}, {unit}", {side: [one[side][key] for one in rounds] for side in SIDES})
    return results


def in_process(side: str, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    inner = [f"--{key}={getattr(options, key)}" for key in ("batch", "tokens")]
    inner += [f"--side={side}", f"--folder={folder}", f"--started={time.time()}"]
    output = subprocess.run([sys.executable, __file__, *inner], check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def show(title: str, figures: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Prints the median of each side, with its ratio to the reference in brackets; returns both."""
    results = {}
    for side, values in figures.items():
        ratios = [value / reference for value, reference in zip(values, figures[REFERENCE], strict=True)]
        results[side] = {"value": statistics.median(values), "ratio": statistics.median(ratios)}
    print(f"{title}: " + ", ".join(f"{side} {one['value']:.3g} ({one['ratio']:.2f})" for side, one in results.items()))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--photos", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="photos at a time, on both sides")
    parser.add_argument("--tokens", type=int, default=20, help="of every text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    for hidden, kind in (("side", str), ("folder", Path), ("started", float)):
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.folder, options.batch, options.tokens, options.started)))
        return
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"{unknown[0]} is none of {', '.join(NAMES)}")
    results = {name: compare(name, options) for name in options.names or NAMES}
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
