"""Draws the scores of docs/results.md as bars, a panel for each question, with their intervals.

    python benchmarks/scores.py [--table docs/scores.csv] [--out docs/scores.png]

The table has a row per bar: the question, the setting, its score, and the ends of its interval (or the least and
highest of several seeds), which may be empty. Bars keep the order of the rows. The picture holds a hash of its table,
by which a test tells whether it is up to date.
"""

import argparse
import csv
from hashlib import sha256
from pathlib import Path
from textwrap import wrap

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Bar = tuple[str, float, float, float]  # setting, score, ends of its interval
COLUMNS = 2
LABEL = 36  # characters of a line


def read_bars(path: Path) -> dict[str, list[Bar]]:
    """Reads the bars of each question.

    Raises:
        ValueError: A score is outside its interval.
    """
    questions: dict[str, list[Bar]] = {}
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            score = float(row["score"])
            low, high = float(row["low"] or score), float(row["high"] or score)
            if not low <= score <= high:
                raise ValueError(f"{path}: {row['question']}, {row['setting']}: {score} is outside {low} to {high}")
            questions.setdefault(row["question"], []).append((row["setting"], score, low, high))
    return questions


def draw(table: Path, path: Path) -> None:
    """Draws a panel of horizontal bars for each question of a table."""
    questions = read_bars(table)
    counts = [len(bars) for bars in questions.values()]
    heights = [1 + max(counts[start : start + COLUMNS]) for start in range(0, len(counts), COLUMNS)]  # with the title
    figure, axes = pyplot.subplots(
        len(heights),
        COLUMNS,
        figsize=(11, 0.36 * sum(heights)),
        layout="constrained",
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for place, (question, bars) in zip(axes.flat, questions.items(), strict=False):
        labels = ["\n".join(wrap(setting, LABEL)) for setting, *_ in bars]
        scores = [score for _, score, *_ in bars]
        place.barh(labels, scores, height=0.6, color="tab:blue")
        for number, (_, score, low, high) in enumerate(bars):
            if low < high:
                place.errorbar(score, number, xerr=[[score - low], [high - score]], capsize=3, color="black")
            place.annotate(f"{score:g}", (high, number), (5, 0), textcoords="offset points", va="center", fontsize=8)
        place.set(title=question, xlim=(0, 1.15 * max(high for *_, high in bars)))
        place.invert_yaxis()
        place.tick_params(labelsize=8)
    for place in axes.flat[len(questions) :]:
        place.set_axis_off()
    figure.savefig(path, dpi=90, metadata={"Description": sha256(table.read_bytes()).hexdigest()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    docs = Path(__file__).resolve().parents[1] / "docs"
    parser.add_argument("--table", type=Path, default=docs / "scores.csv")
    parser.add_argument("--out", type=Path, default=docs / "scores.png")
    given = parser.parse_args()
    draw(given.table, given.out)


if __name__ == "__main__":
    main()
