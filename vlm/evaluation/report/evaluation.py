"""The report of an evaluation with its charts, curves as SVG without a library, and the files of an evaluation."""

import csv
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlm.data.images.image import ImageError
from vlm.data.records import Split
from vlm.errors import UserError, printable
from vlm.evaluation.report.content import (
    CEILING,
    CONTROLS,
    Cards,
    Confusion,
    Finding,
    Note,
    Part,
    Pictures,
    Section,
    Table,
    Texts,
    Verdict,
    metric_title,
)
from vlm.io import page
from vlm.io.files import file_named_in_errors, write_text

ESTIMATES = {"sampled": "sampled"}  # estimates of a score on a part of the split

METRICS = "metrics.csv"  # of a run

Results = Mapping[str, float]
Line = Sequence[tuple[float, float]]
Scale = Callable[[float], float]
Picture = Callable[[str], Image.Image | None]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """An evaluation as plain values.

    Args:
        title: Task and data set.
        task: Name of the task, which determines what `vlm compare` compares.
        split: Name of the split.
        used: Number of evaluated samples.
        checkpoint: The evaluated file or folder; None if there is none.
        results: Scores as split/metric, with controls and intervals.
        predictions, details: Contents of the files of these names.
        sections: The task's part of the report.
        findings: Diagnosed problems of the model.
        verdict: Comparison of the model with its best baseline.
        headlines: Names of the most important metrics.
        curves: Validation metrics to plot over steps.
        remark: Note on the interpretation of the scores.
    """

    title: str
    task: str
    split: str
    used: int
    results: Results
    checkpoint: Path | None = None
    predictions: Sequence[Mapping[str, Any]] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    sections: Sequence[Section] = ()
    findings: Sequence[Finding] = ()
    verdict: Verdict | None = None
    headlines: Sequence[str] = ()
    curves: Sequence[str] = ()
    remark: str = ""

    @property
    def run(self) -> Path | None:
        """The folder of the run that the checkpoint belongs to."""
        folder = None if self.checkpoint is None else self.checkpoint.resolve().parent.parent
        return folder if folder and (folder / METRICS).is_file() else None


def evaluation_page(evaluation: Evaluation, *, picture: Picture) -> str:
    """Returns the whole page as HTML.

    Args:
        picture: Returns the image of a sample by id, or None.
    """
    scores = {name.split("/", 1)[1]: value for name, value in evaluation.results.items()}
    headlines = [name for name in evaluation.headlines if name in scores]
    tiles = [(metric_title(name), format_number(scores[name]), format_interval(scores, name)) for name in headlines]
    tiles += [("loss", format_number(scores["loss"]), "nats per sample or token")] if "loss" in scores else []
    body = [page.tiles(tiles)]
    if verdict := evaluation.verdict:
        advice = [page.paragraph(f"To try next: {'; '.join(verdict.remedies)}.")] if verdict.remedies else []
        sentence = f"{verdict.sentence[:1].upper()}{verdict.sentence[1:]}."
        body.append(page.section("Verdict", page.paragraph(sentence), *advice))
    if evaluation.findings:
        findings = (page.code_block("\n".join(finding.lines())) for finding in evaluation.findings)
        body.append(page.section("What is wrong", *findings))
    body += _render_grounding(scores)
    body.append(render_scores(scores, evaluation.remark))
    facts = [f"{evaluation.split} split", f"{evaluation.used:,} sample{'s' * (evaluation.used != 1)}"]
    if evaluation.run:
        losses = ("train/loss", "val/loss", "val/loss@shuffled", "val/loss@blank")
        curves = read_curves(evaluation.run / METRICS)
        charts = line_chart("loss", {name: curves[name] for name in losses if name in curves})
        for name in (name for name in curves if name.startswith("val/") and name not in losses):
            charts += line_chart(name, {name: curves[name]}) if name.split("/")[1] in evaluation.curves else ""
        if charts:
            body.append(page.section("Curves of the run", f'<div class="charts">{charts}</div>'))
        facts.append(f"run {'/'.join(evaluation.run.parts[-2:])}")  # names without paths: a page may be published
    if evaluation.checkpoint:
        facts.append(f"checkpoint {evaluation.checkpoint.name}")
    for section in evaluation.sections:
        body.append(page.section(section.title, *(_render_part(part, picture) for part in section.parts)))
    return page.page(evaluation.title, ", ".join(facts), body)


def render_scores(scores: Results, remark: str = "") -> str:
    """Returns a table of all scores, intervals and controls, below the remark."""
    names = [name for name in scores if "@" not in name]
    titles = CONTROLS | CEILING | ESTIMATES
    columns = {c: title for c, title in titles.items() if any(f"{name}@{c}" in scores for name in names)}
    header = ["", "model", *(["95% interval"] if any(name.endswith("@low") for name in scores) else [])]
    rows = []
    for name in names:
        row = [metric_title(name), format_number(scores[name])]
        row += [format_interval(scores, name)] if len(header) > 2 else []
        rows.append(row + [format_number(scores.get(f"{name}@{column}")) for column in columns])
    notes = [f"{remark[:1].upper()}{remark[1:]}."] if remark else []
    notes += ["Intervals are from 1,000 bootstrap resamples of the samples."] if len(header) > 2 else []
    if columns.keys() & CONTROLS.keys():
        notes.append("The columns on the right are baselines that see little of the input; a model should beat them.")
    if columns.keys() & CEILING.keys():
        notes.append("The column ceiling is the best possible score on these samples.")
    if columns.keys() & ESTIMATES.keys():
        notes.append("The column on the right is an estimate of the same loss, from batches drawn at random.")
    table = page.table([*header, *columns.values()], rows)
    return page.section("Scores", *([page.paragraph(" ".join(notes), "soft small")] if notes else []), table)


def _render_grounding(scores: Results) -> Iterator[str]:
    """Yields a section on how much the loss depends on the image, as a chart and in words."""
    if "loss@shuffled" not in scores:
        return
    losses = {"own image": scores["loss"], "other image": scores["loss@shuffled"]}
    losses |= {"blank image": scores["loss@blank"]} if "loss@blank" in scores else {}
    gap = scores["loss@shuffled"] / max(1e-12, scores["loss"]) - 1
    looks = gap > 0.01
    verdict = f"With another image, the loss on the same captions changes by {gap:+.0%}: the model "
    verdict += "looks at its image." if looks else "hardly looks at its image."
    facts = [("distinct captions", f"{scores.get('distinct', 0):.0%}", "of all captions")]
    if "length_ratio" in scores:
        facts.append(("caption length", f"{scores['length_ratio']:.2f} x", "that of the references"))
    if "novelty" in scores:
        facts.append(("new captions", f"{scores['novelty']:.0%}", "not in train"))
    chart = bar_chart("loss on the same captions", losses)
    words = page.paragraph(verdict, "good" if looks else "bad")
    yield page.section("Does it look at the image?", words, f'<div class="charts">{chart}{page.tiles(facts)}</div>')


def _render_part(part: Part, picture: Picture) -> str:
    match part:
        case Cards(cards):
            html = []
            for card in cards:
                image = None
                with suppress(ImageError):
                    image = picture(card.image)
                    image = image if card.draw is None or image is None else card.draw(image, page.THUMBNAIL)
                thumbnail = None if image is None else page.thumbnail(image)
                html.append(page.card(thumbnail, card.text, card.lines, card.references))
            return page.cards(html)
        case Confusion():
            return page.picture(page.data_uri(confusion_picture(part), "png"), "confusion matrix")
        case Table(header, rows):
            return page.table(header, rows)
        case Texts(texts):
            return "\n".join(map(page.code_block, texts))
        case Note(text):
            return page.paragraph(text, "soft small")
        case Pictures(pictures):
            return "\n".join(page.picture(page.data_uri(png, "png"), text) for text, png in pictures)


def format_number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def format_interval(scores: Results, name: str) -> str:
    if f"{name}@low" not in scores:
        return ""
    return f"{scores[f'{name}@low']:.3f} to {scores[f'{name}@high']:.3f}"


def pictures_of(split: Split) -> Picture:
    """Images of a split by sample id, in its first epoch; None if a sample has none."""
    places: dict[str, int] = {}

    def picture(name: str) -> Image.Image | None:
        if not places:
            places.update((record.id, index) for index, record in enumerate(split.records()))
        record = split.record(places[name]) if name in places else None
        return record.image() if record is not None and "image" in record else None

    return picture


def check_no_results(folder: Path) -> None:
    """Checks that a folder holds no evaluation, which another one would replace.

    Raises:
        UserError: It holds one; the message names its checkpoint, split and time.
    """
    metrics = folder / "metrics.json"
    if not metrics.is_file():
        return
    of = ""
    with suppress(OSError, ValueError, RecursionError):
        about = json.loads((folder / "about.json").read_text("utf-8"))
        if isinstance(about, dict) and "checkpoint" in about:
            of = f" of {about['checkpoint']} on {about.get('split')}"
    time = datetime.fromtimestamp(metrics.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    raise UserError(f"--out {folder}: holds an evaluation{of} ({time}); give another folder, or remove this one")


def write_results(folder: Path, evaluation: Evaluation, *, picture: Picture) -> None:
    """Writes metrics.json, predictions.json, about.json, report.html and, if the task has them, details.json and
    confusion.png.

    Args:
        folder: Output folder; it is created.
        picture: See `evaluation_page`.
    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about = {"task": evaluation.task, "checkpoint": str(evaluation.checkpoint), "split": evaluation.split}
    about |= {"verdict": evaluation.verdict.sentence} if evaluation.verdict else {}
    files = [("metrics", evaluation.results), ("predictions", list(evaluation.predictions))]
    files += [("about", about)] if evaluation.task else []
    files += [("details", evaluation.details)] if evaluation.details else []
    for name, content in files:
        write_text(folder / f"{name}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    for part in (part for section in evaluation.sections for part in section.parts if isinstance(part, Confusion)):
        with file_named_in_errors(folder / "confusion.png") as path:
            path.write_bytes(confusion_picture(part))
    write_text(folder / "report.html", evaluation_page(evaluation, picture=picture))


COLORS = ("var(--one)", "var(--two)", "var(--three)", "var(--four)", "var(--five)")
WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 24
POINTS = 300  # maximum points of a line


def read_curves(path: Path) -> dict[str, list[tuple[float, float]]]:
    """The columns of a run's metrics.csv as lines over steps; empty if the file does not exist."""
    curves: dict[str, list[tuple[float, float]]] = {}
    if not path.is_file():
        return curves
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, text in row.items():
                try:
                    value = float(text or "nan")
                except ValueError:
                    continue
                if name not in ("step", "epoch") and math.isfinite(value):
                    curves.setdefault(name, []).append((float(row["step"]), value))
    return curves


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
    parts, keys = [], []
    for tick in ticks:
        y = up(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for x, anchor in [(min(xs), "start"), (max(xs), "end")] if max(xs) > min(xs) else [(min(xs), "middle")]:
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">step {x:,.0f}</text>')
    for (name, line), color in zip(lines.items(), COLORS * len(lines), strict=False):
        points = [(f"{across(x):.1f}", f"{up(y):.1f}") for x, y in line]
        path = " ".join(map(",".join, points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        dots = (f'<circle cx="{x}" cy="{y}" r="2.4" fill="{color}"/>' for x, y in points)
        parts += dots if len(line) <= 40 else ()
        key = f'<span class="key" style="background:{color}"></span>{page.escape(name)} {line[-1][1]:.4g}'
        keys.append(f'<span class="mark">{key}</span> ')
    label = f'role="img" aria-label="{page.escape(title, quote=True)}"'
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {label}>{"".join(parts)}</svg>'
    legend = f'<div class="small soft">{"".join(keys)}</div>'
    return f'<figure class="chart"><figcaption>{page.escape(title)}</figcaption>{svg}{legend}</figure>'


def bar_chart(title: str, values: Mapping[str, float]) -> str:
    """Horizontal bars from 0."""
    most = max([*values.values(), 1e-12])
    parts = []
    for place, (name, value) in enumerate(values.items()):
        top, color = 6 + 34 * place, COLORS[place % len(COLORS)]
        length = max(1.0, 220 * value / most)
        parts.append(f'<text x="0" y="{top + 16}">{page.escape(name)}</text>')
        parts.append(f'<rect x="96" y="{top}" width="{length:.1f}" height="22" rx="4" fill="{color}"/>')
        parts.append(f'<text x="{102 + length:.1f}" y="{top + 16}">{value:.3f}</text>')
    svg = f'<svg viewBox="0 0 {WIDTH} {34 * len(values) + 8}" role="img">{"".join(parts)}</svg>'
    return f'<figure class="chart"><figcaption>{page.escape(title)}</figcaption>{svg}</figure>'


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


MAX_COUNTS = 20  # maximum number of classes for counts in cells
MAX_LABELS = 50  # maximum number of labels per axis
MAX_LETTERS = 24  # maximum length of a label


@lru_cache(maxsize=1)  # the page shows the picture of the file
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
    places = list(range(0, len(classes), -(-len(classes) // MAX_LABELS)))
    names, size = [_shorten(classes[place]) for place in places], 10 if few else 8
    axes.set_yticks(places, names, fontsize=size, parse_math=False)
    axes.set_xticks(places, names, fontsize=size, parse_math=False, rotation=45 if few else 90)
    for label in axes.get_xticklabels() if few else ():
        label.set(horizontalalignment="right", rotation_mode="anchor")
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


def _shorten(name: str) -> str:
    """Shortens a name in the middle, because similar names often differ at the end."""
    name = printable(" ".join(name.split()))
    half = MAX_LETTERS // 2
    return name if len(name) <= MAX_LETTERS else f"{name[: half - 1]}\u2026{name[-half:]}"
