"""The report of an evaluation, and the files that an evaluation writes."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from PIL import Image

from vlm.data.images.image import ImageError
from vlm.errors import UserError
from vlm.evaluation.report import charts
from vlm.evaluation.report.charts import confusion_picture
from vlm.evaluation.report.sections import Card, Cards, Confusion, Finding, Note, Part, Pictures, Section, Table, Texts
from vlm.evaluation.report.verdict import CEILING, CONTROLS, TITLES, Verdict
from vlm.io import page
from vlm.io.files import file_named_in_errors, write_text

ESTIMATES = {"sampled": "sampled"}  # estimates of a score on a part of the split

METRICS = "metrics.csv"  # of a run

Results = Mapping[str, float]
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
    body = [headlines(scores, evaluation.headlines)]
    if verdict := evaluation.verdict:
        advice = [page.paragraph(f"To try next: {'; '.join(verdict.remedies)}.")] if verdict.remedies else []
        sentence = f"{verdict.sentence[:1].upper()}{verdict.sentence[1:]}."
        body.append(page.section("Verdict", page.paragraph(sentence), *advice))
    if evaluation.findings:
        findings = (page.code_block("\n".join(finding.lines())) for finding in evaluation.findings)
        body.append(page.section("What is wrong", *findings))
    body += _render_grounding(scores)
    body.append(scores_section(scores, evaluation.remark))
    if evaluation.run and (curves := curve_charts(charts.read_curves(evaluation.run / METRICS), evaluation.curves)):
        body.append(page.section("Curves of the run", curves))
    body += [
        page.section(section.title, *(_render_part(part, picture) for part in section.parts))
        for section in evaluation.sections
    ]
    samples = f"{evaluation.used:,} sample{'s' * (evaluation.used != 1)}"
    return page.page(
        evaluation.title, ", ".join([f"{evaluation.split} split", samples, *_describe_origin(evaluation)]), body
    )


def _describe_origin(evaluation: Evaluation) -> Iterator[str]:
    """Yields the names of run and checkpoint, without paths, since a page may be published."""
    if evaluation.run:
        yield f"run {'/'.join(evaluation.run.parts[-2:])}"
    if evaluation.checkpoint:
        yield f"checkpoint {evaluation.checkpoint.name}"


def headlines(scores: Results, wanted: Sequence[str]) -> str:
    """Tiles with the most important scores and their intervals."""
    names = [name for name in wanted if name in scores]
    items = [(TITLES.get(name, name.replace("_", " ")), number(scores[name]), interval(scores, name)) for name in names]
    items += [("loss", number(scores["loss"]), "nats per sample or token")] if "loss" in scores else []
    return page.tiles(items)


def scores_section(scores: Results, remark: str = "") -> str:
    """A table of all scores, intervals and controls, below the remark."""
    names = [name for name in scores if "@" not in name]
    titles = CONTROLS | CEILING | ESTIMATES
    columns = {c: title for c, title in titles.items() if any(f"{name}@{c}" in scores for name in names)}
    header = ["", "model", *(["95% interval"] if any(name.endswith("@low") for name in scores) else [])]
    rows = []
    for name in names:
        row = [TITLES.get(name, name.replace("_", " ")), number(scores[name])]
        row += [interval(scores, name)] if len(header) > 2 else []
        rows.append(row + [number(scores.get(f"{name}@{column}")) for column in columns])
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
    chart = charts.bars("loss on the same captions", losses)
    words = page.paragraph(verdict, "good" if looks else "bad")
    yield page.section("Does it look at the image?", words, f'<div class="charts">{chart}{page.tiles(facts)}</div>')


def curve_charts(curves: Mapping[str, charts.Line], wanted: Collection[str]) -> str:
    """Small charts over steps: one of all losses, and one per validation metric."""
    losses = ("train/loss", "val/loss", "val/loss@shuffled", "val/loss@blank")
    figures = [charts.line_chart("loss", {name: curves[name] for name in losses if name in curves})]
    metrics = [name for name in curves if name.startswith("val/") and "@" not in name and name not in losses]
    figures += [charts.line_chart(name, {name: curves[name]}) for name in metrics if name.split("/")[1] in wanted]
    charts_html = "".join(filter(None, figures))
    return f'<div class="charts">{charts_html}</div>' if charts_html else ""


def _render_part(part: Part, picture: Picture) -> str:
    match part:
        case Cards(cards):
            return page.cards(_render_card(card, picture) for card in cards)
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


def _render_card(card: Card, picture: Picture) -> str:
    image = None
    with suppress(ImageError):
        image = picture(card.image)
    return page.card(None if image is None else page.thumbnail(image), card.text, card.lines, card.references)


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def interval(scores: Results, name: str) -> str:
    if f"{name}@low" not in scores:
        return ""
    return f"{scores[f'{name}@low']:.3f} to {scores[f'{name}@high']:.3f}"


def pictures_of(split: Any) -> Picture:
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
    about: Any = None
    with suppress(OSError, ValueError, RecursionError):
        about = json.loads((folder / "about.json").read_text("utf-8"))
    about = about if isinstance(about, dict) else {}
    of = f" of {about['checkpoint']} on {about.get('split')}" if "checkpoint" in about else ""
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
    files: dict[str, Any] = {"metrics": evaluation.results, "predictions": list(evaluation.predictions)}
    about = {"task": evaluation.task, "checkpoint": str(evaluation.checkpoint), "split": evaluation.split}
    about |= {"verdict": evaluation.verdict.sentence} if evaluation.verdict else {}
    files |= {"about": about} if evaluation.task else {}
    files |= {"details": evaluation.details} if evaluation.details else {}
    for name, content in files.items():
        write_text(folder / f"{name}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    for part in (part for section in evaluation.sections for part in section.parts if isinstance(part, Confusion)):
        with file_named_in_errors(folder / "confusion.png") as path:
            path.write_bytes(confusion_picture(part))
    write_text(folder / "report.html", evaluation_page(evaluation, picture=picture))
