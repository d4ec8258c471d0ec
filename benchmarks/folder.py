"""Compares captioning a folder of photos end to end with the engine alone on tensors in memory.

    python benchmarks/folder.py --images FOLDER --checkpoint FILE.ckpt [--count 2000] [--out FILE.json]

Everything runs in one process, so that no side pays for start-up: the checkpoint is loaded once, then whole runs over
the same photos alternate. `engine` is `Captioner.results` on pixels that are read and resized before the clock starts.
`folder` is `write_results`, all that `vlm caption FOLDER --format jsonl --out FILE` does after loading: reading,
decoding, resizing, captioning, writing; it runs with the default number of workers and without workers. The captions of
all three must be equal. Times are medians over rounds; ratios are to the engine's time in the same round.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from vlm.data.images.image import load_image
from vlm.inference.command_options import CaptionOptions
from vlm.inference.inputs import default_workers, find_images
from vlm.inference.use import write_results
from vlm.io.output import Output, Records
from vlm.tasks.captioning.predict import Captioner

Run = Callable[[], list[str]]


def engine(captioner: Captioner, pixels: Sequence[Tensor], options: CaptionOptions) -> list[str]:
    batch = options.batch_size
    batches = (pixels[start : start + batch] for start in range(0, len(pixels), batch))
    found = dict(captioner.results(batches, options))
    return [found[place][0].text for place in range(len(pixels))]


def folder(captioner: Captioner, paths: Sequence[str], options: CaptionOptions) -> list[str]:
    with tempfile.TemporaryDirectory() as place:
        with Output(f"{place}/captions.jsonl") as output:
            records = Records(form="jsonl", fields=(), output=output)
            write_results(captioner, paths, options, records)
        return [json.loads(line)["caption"] for line in Path(f"{place}/captions.jsonl").read_text().splitlines()]


def time_rounds(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each round of each side; an extra first round is a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    outputs: list[list[str]] = []
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            outputs.append(run())
            if turn:
                times[name].append(time.perf_counter() - start)
    assert all(captions == outputs[0] for captions in outputs), "captions differ"
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--beam", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    captioner, workers = Captioner(args.checkpoint), default_workers()
    paths = find_images([args.images])[: args.count]
    options, alone = (
        CaptionOptions(beam=args.beam, batch_size=args.batch_size, workers=count) for count in (workers, 0)
    )
    pixels = [captioner.pixels(load_image(path)) for path in paths]
    runs: dict[str, Run] = {
        "engine": lambda: engine(captioner, pixels, options),
        f"folder, {workers} workers": lambda: folder(captioner, paths, options),
        "folder, 0 workers": lambda: folder(captioner, paths, alone),
    }
    times, rows = time_rounds(runs, args.rounds), {}
    print(f"{len(paths)} photos\n{'':<22}{'seconds':>9}{'ms/photo':>10}{'ratio':>8}{'min':>8}{'max':>8}")
    for name, own in times.items():
        ratios = sorted(one / alone for one, alone in zip(own, times["engine"], strict=True))
        row = {"seconds": statistics.median(own), "ratio": statistics.median(ratios), "all_seconds": own}
        rows[name] = row | {"ratio_min": ratios[0], "ratio_max": ratios[-1]}
        print(f"{name:<22}{row['seconds']:>9.2f}{row['seconds'] / len(paths) * 1e3:>10.2f}", end="")
        print(f"{row['ratio']:>8.3f}{ratios[0]:>8.3f}{ratios[-1]:>8.3f}")
    if args.out is not None:
        Path(args.out).write_text(json.dumps({"photos": len(paths), "beam": args.beam, "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
