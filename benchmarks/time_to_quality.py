"""Compares time to quality with a Hugging Face loop: validation loss and CIDEr over minutes of training.

    python benchmarks/time_to_quality.py --root FOLDER --out FOLDER [--minutes 20] [--rates 0.5 1 2] [--seeds 0 1 2]
    python benchmarks/time_to_quality.py --root FOLDER --out FOLDER --side peer
    python benchmarks/time_to_quality.py --text FILE --out FOLDER [--experiment shakespeare_cpu]

"Ours" is `python train.py experiment=...` in its own process, with files, augmentation, logging and saves between
validations. The peer of a captioner is VisionEncoderDecoderModel (ViT + GPT-2, no pretrained weights) on pairs of photo
and caption, grouped by length with Hugging Face's own sampler; its own processor resizes all photos beforehand, which
is not timed, and half of them are mirrored. The peer of a language model is GPT2LMHeadModel in nanoGPT's shape on
windows of an array in memory. Peers compute in bfloat16 if the CPU is faster in it, with fused AdamW, clipping and half
a cosine. Sizes, data, tokenizer and threads are equal; each side has its own batches, optimiser and learning rate.

Both train for the same time, which starts with the first batch and stops during validations. As the number of steps is
unknown, the learning rate of both follows the elapsed share of the time (time_budget.py). Ours has the experiment's
rate; the peer tries several with the first seed and uses the one with the best final loss for its other seeds. Losses
are nats per caption, or per character, of the whole validation split; CIDEr is of greedy captions of all its photos,
computed by our CaptionMetric. Each training is written to a file in --out when it ends, and is not repeated while the
settings stay the same, so several calls can share the work.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from vlm.machine import tune

tune()  # applies to both sides
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parent))

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from language_modeling import BATCH
from time_budget import Clock
from tuned_peers import Captions, Curve, Texts, train_peer

from vlm.config.compose import compose
from vlm.io.files import write_text
from vlm.training.run.train import silence_libraries

ROOT = Path(__file__).resolve().parents[1]
PAIRS, RATE = 64, 1e-3  # of the peers: captions per step, and nanoGPT's learning rate for small models
AS_PEER = ("model/encoder=vit", "model.encoder.mlp_ratio=4.0")  # plain patches, and the same ratio in both stacks
SHARES = (0.25, 0.5, 1.0)
COLORS = {"ours": "#1f5fa8", "peer": "#b5651d"}


def train_ours(overrides: list[str], runs: Path, name: str, clock: Clock, tokens: float) -> Curve:
    """Trains ours; returns its curve from the run's metrics.csv, with losses per token multiplied by `tokens`."""
    budget = f"{{_target_: time_budget.TimeBudget, seconds: {clock.seconds}, points: {clock.points}}}"
    options = [f"name={name}", "trust=time_budget", f"+callbacks.budget={budget}"]  # it decides when to validate
    options += ["trainer.check_val_every_n_epoch=null", "trainer.val_check_interval=1"]
    options += ["trainer.max_epochs=-1", "trainer.max_steps=-1"]
    runs.mkdir(parents=True, exist_ok=True)
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    with (runs / f"{name}.log").open("w") as log:
        command = [sys.executable, str(ROOT / "train.py"), *overrides, *options]
        done = subprocess.run(command, stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": paths})
    if done.returncode:
        raise SystemExit(f"train.py ended with status {done.returncode}; see {log.name}")
    with sorted(runs.glob(f"{name}/*/metrics.csv"))[-1].open(newline="") as file:  # earlier ones were interrupted
        rows = [row for row in csv.DictReader(file) if row["val/loss"]]
    names = {"val/train_seconds": "seconds", "val/loss": "loss", "val/cider": "cider"}
    curve = [{key: float(row[name]) for name, key in names.items() if name in row} for row in rows]
    return [row | {"loss": row["loss"] * tokens} for row in curve]


class Curves:
    """Curves of trainings, one file each; a curve that is already there is not trained again.

    Args:
        folder: Folder of the files.
        settings: Settings of each side; a file with other settings is replaced.
        train: Returns the curve of a side, a seed and a factor of the learning rate.
    """

    def __init__(self, folder: Path, settings: Mapping[str, dict[str, Any]], train: Callable[..., Curve]) -> None:
        self.folder, self.settings, self.train = folder, settings, train

    def curve(self, side: str, seed: int, factor: float = 1.0) -> Curve:
        path = self.folder / f"{side}-seed{seed}-rate{factor:g}.json"
        entry = json.loads(path.read_text()) if path.is_file() else {}
        if entry.get("settings") != self.settings[side]:
            entry = {"settings": self.settings[side], "curve": self.train(side, seed, factor)}
            write_text(path, json.dumps(entry, indent=1) + "\n")
        return entry["curve"]

    def best(self, side: str, seeds: list[int], factors: list[float]) -> list[Curve]:
        """Returns the curves of all seeds with the learning rate that has the lowest final loss for the first seed."""
        ends = {factor: self.curve(side, seeds[0], factor)[-1]["loss"] for factor in factors}
        return [self.curve(side, seed, min(ends, key=ends.__getitem__)) for seed in seeds]


def at(curve: Curve, metric: str, seconds: float) -> float:
    """Returns the metric of the first validation at or after a time."""
    return next((row[metric] for row in curve if row["seconds"] >= seconds), curve[-1][metric])


def report(curves: dict[str, list[Curve]], budget: float) -> None:
    """Prints mean, minimum and maximum over seeds, the margin of ours, and when ours reaches the peer's final value."""
    print(f"{'':<14}" + "".join(f"{f'{share * budget / 60:g} min':>28}" for share in SHARES))
    for metric in list(curves["ours"][0][0])[1:]:
        means: dict[str, list[float]] = {}
        for side, runs in curves.items():
            values = [[at(run, metric, share * budget) for run in runs] for share in SHARES]
            means[side] = list(map(statistics.mean, values))
            cells = (f"{statistics.mean(row):.3f} ({min(row):.3f} to {max(row):.3f})" for row in values)
            print(f"{metric + ', ' + side:<14}" + "".join(f"{cell:>28}" for cell in cells))
        sign = -1 if metric == "loss" else 1
        margins = (sign * (ours - peer) for ours, peer in zip(means["ours"], means["peer"], strict=True))
        print(f"{'  better by':<14}" + "".join(f"{margin:>28.3f}" for margin in margins))
        reached = sign * means["peer"][-1]
        times = (row[0]["seconds"] for row in zip(*curves["ours"], strict=False) if reached <= sign * mean(row, metric))
        print(f"  the peer's last {metric}: " + next((f"ours after {time / 60:.2g} min" for time in times), "not ours"))


def mean(rows: Iterable[dict[str, float]], metric: str) -> float:
    return statistics.mean(row[metric] for row in rows)


def plot(curves: dict[str, list[Curve]], path: Path, unit: str) -> None:
    """Plots one panel per metric: each side's mean over minutes, with the range of its seeds."""
    metrics = list(curves["ours"][0][0])[1:]
    figure, axes = plt.subplots(1, len(metrics), figsize=(4.2 * len(metrics), 3.2), squeeze=False, layout="constrained")
    for axis, metric in zip(axes[0], metrics, strict=True):
        for side, runs in curves.items():
            points = list(zip(*runs, strict=False))
            minutes = [mean(point, "seconds") / 60 for point in points]
            values = [[row[metric] for row in point] for point in points]
            axis.plot(minutes, list(map(statistics.mean, values)), "o-", color=COLORS[side], label=side)
            axis.fill_between(minutes, list(map(min, values)), list(map(max, values)), color=COLORS[side], alpha=0.2)
        axis.set_title({"loss": f"loss, nats a {unit}", "cider": "CIDEr"}[metric], fontsize=10)
        axis.set_xlabel("minutes of training")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def compare(args: argparse.Namespace) -> None:
    out, seconds = args.out.resolve(), 60 * args.minutes
    experiment = args.experiment or ("captioning_flickr8k" if args.root else "shakespeare_cpu_modern")
    place = f"data.root={Path(args.root).resolve()}" if args.root else f"data.path={Path(args.text).resolve()}"
    overrides = [f"experiment={experiment}", place, f"runs={out / 'runs'}", "trainer=cpu", "test=false"]
    overrides += ["task.val_captions=null", *AS_PEER] if args.root else []
    config = compose([*overrides, *args.overrides])
    batch = args.batch or (PAIRS if args.root else BATCH)
    peer = Captions(config, batch) if args.root else Texts(config, batch)

    def train(side: str, seed: int, factor: float) -> Curve:
        clock = Clock(seconds, args.points)
        if side == "peer":
            return train_peer(peer, clock, seed=seed, rate=factor * RATE)
        own = [*overrides, *args.overrides, f"seed={seed}"]
        return train_ours(own, out / "runs", f"seed{seed}", clock, peer.tokens)

    ours = {
        "experiment": experiment,
        "data": place,
        "overrides": args.overrides,
        "minutes": args.minutes,
        "points": args.points,
    }
    kept = Curves(out / "curves", {"ours": ours, "peer": ours | {"batch": batch}}, train)
    rates = {"ours": [1.0], "peer": args.rates}
    if args.side:
        kept.best(args.side, args.seeds, rates[args.side])
        return
    for factor in args.rates:
        loss = kept.curve("peer", args.seeds[0], factor)[-1]["loss"]
        print(f"peer, learning rate {factor * RATE:g}: loss {loss:.3f}", flush=True)
    curves = {side: kept.best(side, args.seeds, rates[side]) for side in COLORS}
    seeds = " ".join(map(str, args.seeds))
    print(f"{experiment}, seeds {seeds}, validated on {peer.validation_data}; losses are nats a {peer.unit}")
    report(curves, seconds)
    plot(curves, out / "time_to_quality.png", peer.unit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--root", help="Flickr8k's folder, for captions")
    data.add_argument("--text", help="a file, for text character by character")
    parser.add_argument("--out", type=Path, required=True, help="folder of the curves, the plot and our runs")
    parser.add_argument("--side", choices=list(COLORS), help="the only one to train, without a report")
    parser.add_argument("--experiment", help="ours; captioning_flickr8k or shakespeare_cpu_modern by default")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--points", type=int, default=8, help="validations; a multiple of 4 has the table's times")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="factors of the peer's learning rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--batch", type=int, help="of the peer: pairs, or windows of text")
    parser.add_argument("--overrides", nargs="*", default=[], help="of our config, for both where it says sizes")
    args = parser.parse_args()
    silence_libraries()
    compare(args)


if __name__ == "__main__":
    main()
