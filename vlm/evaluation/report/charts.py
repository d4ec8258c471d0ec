"""Charts of a report: curves as SVG without a library, and a confusion matrix."""

import csv
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vlm.errors import printable
from vlm.evaluation.report.sections import Confusion
from vlm.io.page import escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes


COLORS = ("var(--one)", "var(--two)", "var(--three)", "var(--four)", "var(--five)")
WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 24
POINTS = 300  # maximum points of a line

Line = Sequence[tuple[float, float]]
Scale = Callable[[float], float]


def read_curves(path: Path) -> dict[str, list[tuple[float, float]]]:
    """The columns of a run's metrics.csv as lines over steps; empty if the file does not exist."""
    curves: dict[str, list[tuple[float, float]]] = {}
    if not path.is_file():
        return curves
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                value = _parse_number(text)
                if name not in ("step", "epoch") and value is not None:
                    curves.setdefault(name, []).append((float(row["step"]), value))
    return curves


def _parse_number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def line_chart(title: str, lines: Mapping[str, Line]) -> str:
    """A chart of lines over steps, with names and last values below."""
    lines = {name: [*line[: -1 : -(-len(line) // POINTS)], line[-1]] for name, line in lines.items() if line}
    xs = [x for line in lines.values() for x, _ in line]
    ys = [y for line in lines.values() for _, y in line]
    if not xs:
        return ""
    ticks = nice_ticks(min(ys), max(ys))
    across = _make_scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = _make_scale(min(ticks[0], *ys), max(ticks[-1], *ys), HEIGHT - BOTTOM, TOP)
    parts = [_draw_grid(ticks, up), _draw_step_labels(min(xs), max(xs), across)]
    for (_, line), color in zip(lines.items(), COLORS * len(lines), strict=False):
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line)
        dots = "".join(f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.4" fill="{color}"/>' for x, y in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        parts.append(dots if len(line) <= 40 else "")
    label = f'role="img" aria-label="{escape(title, quote=True)}"'
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {label}>{"".join(parts)}</svg>'
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{svg}{_draw_legend(lines)}</figure>'


def bars(title: str, values: Mapping[str, float]) -> str:
    """Horizontal bars from 0."""
    most = max([*values.values(), 1e-12])
    parts = []
    for place, (name, value) in enumerate(values.items()):
        top, color = 6 + 34 * place, COLORS[place % len(COLORS)]
        length = max(1.0, 220 * value / most)
        parts.append(f'<text x="0" y="{top + 16}">{escape(name)}</text>')
        parts.append(f'<rect x="96" y="{top}" width="{length:.1f}" height="22" rx="4" fill="{color}"/>')
        parts.append(f'<text x="{102 + length:.1f}" y="{top + 16}">{value:.3f}</text>')
    svg = f'<svg viewBox="0 0 {WIDTH} {34 * len(values) + 8}" role="img">{"".join(parts)}</svg>'
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{svg}</figure>'


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers within the range of values."""
    if high - low < 1e-12 * max(1.0, abs(high)):
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [at * step for at in range(first, math.floor(high / step + 1e-9) + 1)] or [low, high]


def _make_scale(low: float, high: float, start: float, end: float) -> Scale:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _draw_grid(ticks: Sequence[float], up: Scale) -> str:
    lines = []
    for tick in ticks:
        y = up(tick)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    return "".join(lines)


def _draw_step_labels(low: float, high: float, across: Scale) -> str:
    ends = [(low, "start"), (high, "end")] if high > low else [(low, "middle")]
    return "".join(
        f'<text x="{across(at):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">step {at:,.0f}</text>'
        for at, anchor in ends
    )


def _draw_legend(lines: Mapping[str, Line]) -> str:
    marks = (
        f'<span class="mark"><span class="key" style="background:{color}"></span>'
        f"{escape(name)} {line[-1][1]:.4g}</span> "
        for (name, line), color in zip(lines.items(), COLORS * len(lines), strict=False)
    )
    return f'<div class="small soft">{"".join(marks)}</div>'


MAX_COUNTS = 20  # maximum number of classes for counts in cells
MAX_LABELS = 50  # maximum number of labels per axis
MAX_LETTERS = 24  # maximum length of a label


def confusion_picture(confusion: Confusion) -> bytes:
    """A confusion matrix as a PNG; the colour is the share of each true class."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    matrix, classes = np.array(confusion.matrix), confusion.classes
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    few = len(classes) <= MAX_COUNTS
    side = min(14.0, max(5.0, 2.5 + (0.55 if few else 0.16) * len(classes)))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    # Square root of the shares, because rare confusions would be invisible on a linear scale.
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    _label_axes(axes, classes, few)
    right, total = int(np.trace(matrix)), int(matrix.sum())
    title = f"{right:,} of {total:,} right ({right / max(1, total):.1%})"
    axes.set(xlabel="predicted", ylabel="true", title=title)
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, label="share of the true class")
    if few:
        size = 9 if matrix.max(initial=0) < 10_000 else 7
        for (row, column), number in np.ndenumerate(matrix):
            color = "white" if shares[row, column] > 0.3 else "black" if number else "silver"
            axes.text(column, row, f"{number}", ha="center", va="center", color=color, fontsize=size)
    file = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # characters missing in the font are drawn as boxes
        figure.savefig(file, dpi=110, format="png", bbox_inches="tight")
    return file.getvalue()


def _label_axes(axes: "Axes", classes: Sequence[str], few: bool) -> None:
    """Labels as many classes as there is room for."""
    places = list(range(0, len(classes), -(-len(classes) // MAX_LABELS)))
    names = [_shorten(classes[place]) for place in places]
    size = 10 if few else 8
    axes.set_yticks(places, names, fontsize=size, parse_math=False)
    axes.set_xticks(places, names, fontsize=size, parse_math=False, rotation=45 if few else 90)
    if few:
        for label in axes.get_xticklabels():
            label.set(horizontalalignment="right", rotation_mode="anchor")


def _shorten(name: str) -> str:
    """Shortens a name in the middle, because similar names often differ at the end."""
    name = printable(" ".join(name.split()))
    half = MAX_LETTERS // 2
    return name if len(name) <= MAX_LETTERS else f"{name[: half - 1]}\u2026{name[-half:]}"
