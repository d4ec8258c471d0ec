"""Measures all figures of a GPU in under ten minutes; prints each beside its bar, and writes JSON.

    python benchmarks/gpu/all.py --text FILE [--out all.json] [--seconds 570] [--only NAME ...]

FILE is a text of at least a million characters. Each part runs in its own process, which is killed when its time is
over; parts for which no time is left are named. Exits with status 1 if a part failed or a figure is below its bar.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from device import keep, require_gpu
from PIL import Image

HERE = Path(__file__).parent
PHOTOS, SIDE = 2048, 320  # number and width of the JPEGs that are drawn


@dataclass(frozen=True)
class Figure:
    """A figure of a part.

    Args:
        name: Its label in the table.
        read: Finds it in the part's results.
        bar: Its lower bound, if any.
        form: Its format string.
    """

    name: str
    read: Callable[[dict[str, Any]], Any]
    bar: float | None = None
    form: str = "{:,.0f}"


@dataclass(frozen=True)
class Part:
    """A script with its options, its time limit in seconds, and its figures."""

    name: str
    command: list[str]
    seconds: int
    figures: list[Figure]


def training(case: str, *options: str, seconds: int, figures: list[Figure]) -> Part:
    name = " ".join([case, *(option for option in options if option == "--memory")])
    return Part(name, ["training_speed.py", case, *options], seconds, figures)


def value(key: str, factor: float = 1.0) -> Callable[[dict[str, Any]], float]:
    return lambda figures: figures[key] * factor


def decoding() -> list[Figure]:
    bars = {"1x1": 5, "64x1": 5, "1x4": 2, "64x4": 2}
    cases = ("1x1", "64x1", "256x1", "1x4", "64x4", "256x4")
    return [
        Figure(
            f"decoding, {case.split('x')[0]} images, {'greedy' if case.endswith('x1') else 'beam 4'}, times HF",
            lambda figures, case=case: figures[f"S {case}"]["ratio"],
            bars.get(case),
            "{:.2f}",
        )
        for case in cases
    ]


def kernels() -> list[Figure]:
    uses = ("GPT-2 row", "GPT-2 row with documents", "ViT-S", "packed captions", "cross-attention", "decode step")
    return [Figure(f"kernel: {use}", lambda figures, use=use: figures[use]["chosen"], form="{}") for use in uses]


def plan(text: str, photos: str) -> list[Part]:
    """Returns the parts, the most informative first."""
    mfu = value("mfu", 100)
    return [
        Part("attention", ["attention_kernels.py", "--runs", "5"], 60, kernels()),
        training(
            "gpt2",
            *["--text", text],
            seconds=120,
            figures=[Figure("GPT-2 124M, tokens/s", value("tokens_per_s")), Figure("GPT-2 124M, MFU %", mfu, 40)],
        ),
        training(
            "vits",
            "--memory",
            seconds=100,
            figures=[Figure("ViT-S/16 from memory, images/s", value("images_per_s"), 9500)],
        ),
        training(
            "captioner",
            "--memory",
            seconds=110,
            figures=[
                Figure("captioner M, captions/s", value("images_per_s", 5)),
                Figure("captioner M, MFU %", mfu, 35),
            ],
        ),
        Part("decoding", ["decoding_speed.py", "--shapes", "S", "--queue", "0", "--rounds", "2"], 170, decoding()),
        training(
            "jpeg",
            *["--images", photos, "--steps", "10"],
            seconds=100,
            figures=[Figure("ViT-S/16 from JPEG, images/s", value("images_per_s"))],
        ),
    ]


def run(part: Part, seconds: float) -> dict[str, Any] | str:
    """Returns the figures of a part, or one line that says why there are none."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "figures.json"
        command = [sys.executable, str(HERE / part.command[0]), *part.command[1:], "--out", str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"took longer than {seconds:.0f} s"
        if done.returncode or not out.is_file():
            return f"ended with status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:120]}"
        return json.loads(out.read_text())


def table(parts: list[Part], results: dict[str, dict[str, Any] | str]) -> Iterator[tuple[str, bool]]:
    """Yields a line for each figure, and whether it passes."""
    for part in parts:
        figures = results.get(part.name, "not run: no time was left")
        if isinstance(figures, str):
            yield f"{part.name:46s}{figures}", False
            continue
        for figure in part.figures:
            try:
                number = figure.read(figures)
            except KeyError as missing:
                yield f"{figure.name:46s}{'none':>12}  {missing} is not among the figures", False
                continue
            well = figure.bar is None or number >= figure.bar
            bar = "" if figure.bar is None else f"  bar {figure.bar:,}{'' if well else '  BELOW'}"
            yield f"{figure.name:46s}{figure.form.format(number):>12}{bar}", well


def draw_photos(folder: Path) -> None:
    """Draws photo-sized JPEGs into two class folders."""
    for number in range(PHOTOS):
        rng = np.random.default_rng(number)
        image = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((SIDE, SIDE * 3 // 4))
        place = folder / f"class{number % 2}" / f"{number}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        image.save(place, quality=85)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a file of text")
    parser.add_argument("--out")
    parser.add_argument("--seconds", type=float, default=570)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts to run")
    args = parser.parse_args()
    require_gpu()
    end, results = time.monotonic() + args.seconds, {}
    with tempfile.TemporaryDirectory() as photos:
        parts = [part for part in plan(args.text, photos) if not args.only or part.name.split()[0] in args.only]
        if any(part.name == "jpeg" for part in parts):
            draw_photos(Path(photos))
        for part in parts:
            left = end - time.monotonic()
            if left > part.seconds / 3:  # a process needs some time to get going
                print(f"{part.name} ...", file=sys.stderr, flush=True)
                results[part.name] = run(part, min(left, part.seconds))
                keep(results, args.out)
    lines = list(table(parts, results))
    print("\n".join(line for line, _ in lines))
    sys.exit(not all(well for _, well in lines))


if __name__ == "__main__":
    main()
