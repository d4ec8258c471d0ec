"""Draws the validation curves of several runs, a panel for each metric and a line for each run.

    python benchmarks/curves.py NAME=RUN [NAME=RUN ...] --metrics val/loss val/cider --out FILE.png

RUN is a run's folder, whose metrics.csv is read; NAME labels its line. The x axis is the optimiser step.
"""

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Curve = tuple[list[int], list[float]]  # steps, values


def read_curve(run: Path, metric: str) -> Curve:
    """Reads the values of a metric over the steps of a run; steps count from 1.

    Raises:
        ValueError: The run has no values of it.
    """
    path = run / "metrics.csv"
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    points = {int(row["step"]) + 1: float(row[metric]) for row in rows if row.get(metric)}
    if not points:
        names = ", ".join(name for name in (rows[0] if rows else ()) if name.startswith("val/"))
        raise ValueError(f"{path}: holds no values of {metric}; choose from {names}")
    return list(points), list(points.values())


def draw(runs: Mapping[str, Path], metrics: Sequence[str], path: Path) -> None:
    """Draws the curves of runs by their labels."""
    figure, axes = pyplot.subplots(
        1, len(metrics), figsize=(5 * len(metrics), 3.6), layout="constrained", squeeze=False
    )
    for place, metric in zip(axes.flat, metrics, strict=True):
        for name, run in runs.items():
            place.plot(*read_curve(run, metric), marker="o", markersize=4, label=name)
        place.set(xlabel="step", title=metric)
        place.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--metrics", nargs="+", default=["val/loss"])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    pairs = [run.rpartition("=") for run in given.runs]
    if not all(name for name, _, _ in pairs):
        parser.error("each run needs a label: NAME=RUN")
    draw({name: Path(run) for name, _, run in pairs}, given.metrics, given.out)


if __name__ == "__main__":
    main()
