"""Picture of a confusion matrix."""

import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from vlm.errors import printable
from vlm.evaluation.report.sections import Confusion

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    _label(axes, classes, few)
    axes.set(xlabel="predicted", ylabel="true", title=_title(matrix))
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


def _label(axes: "Axes", classes: Sequence[str], few: bool) -> None:
    """Labels as many classes as there is room for."""
    places = list(range(0, len(classes), -(-len(classes) // MAX_LABELS)))
    names = [_short(classes[place]) for place in places]
    size = 10 if few else 8
    axes.set_yticks(places, names, fontsize=size, parse_math=False)
    axes.set_xticks(places, names, fontsize=size, parse_math=False, rotation=45 if few else 90)
    if few:
        for label in axes.get_xticklabels():
            label.set(horizontalalignment="right", rotation_mode="anchor")


def _short(name: str) -> str:
    """Shortens a name in the middle, because similar names often differ at the end."""
    name = printable(" ".join(name.split()))
    half = MAX_LETTERS // 2
    return name if len(name) <= MAX_LETTERS else f"{name[: half - 1]}\u2026{name[-half:]}"


def _title(matrix: np.ndarray) -> str:
    total = int(matrix.sum())
    return f"{int(np.trace(matrix)):,} of {total:,} right ({np.trace(matrix) / max(1, total):.1%})"
