"""The page that an evaluation leaves: scores with intervals, controls, curves, and what was made of some samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from vlm.data.images.image import ImageError
from vlm.evaluation.report import charts, page
from vlm.randomness import numpy_rng

SHOWN = 8  # samples of a kind
TITLES = {"bleu4": "BLEU-4", "bleu1": "BLEU-1", "bleu2": "BLEU-2", "bleu3": "BLEU-3", "rouge_l": "ROUGE-L"}
TITLES |= {"cider": "CIDEr", "exact_match": "exact match", "top5": "top 5", "length_ratio": "length ratio"}
HEADLINES = ("cider", "bleu4", "rouge_l", "exact_match", "accuracy", "balanced_accuracy", "bits_per_byte", "perplexity")
CURVES = {"cider", "bleu4", "exact_match", "distinct", "length_ratio", "accuracy", "calibration_error", "bits_per_byte"}
CONTROLS = {"constant": "best constant", "shuffled": "shuffled", "blank": "blank image", "sampled": "sampled"}

Results = Mapping[str, float]
Picture = Callable[[str], Image.Image | None]


def evaluation_page(
    *,
    title: str,
    split: str,
    results: Results,
    predictions: Sequence[Mapping[str, Any]],
    details: Mapping[str, Any],
    picture: Picture,
    confusion: bytes | None = None,
    curves: Mapping[str, charts.Line] | None = None,
    attention: Sequence[tuple[str, bytes]] = (),
) -> str:
    """The whole page.

    Args:
        title: What was evaluated.
        split: On which split.
        results: As in metrics.json.
        predictions, details: As in their files.
        picture: Gives the image of a sample's name, or None where there is none to show.
        confusion: The picture of the confusion matrix as PNG.
        curves: Lines of the run by metric.
        attention: Captions, each with a picture as PNG of where the model looked at each word.
    """
    scores = {name.split("/", 1)[1]: value for name, value in results.items()}
    samples = len(details.get("images", predictions))
    body = [headlines(scores), *_grounding(scores), scores_section(scores)]
    body += [page.section("Curves of the run", drawn)] if (drawn := curve_charts(curves or {})) else []
    if "images" in details:
        body += caption_sections(details["images"], picture)
        body += attention_section(attention)
    elif "confusion" in details:
        body += class_sections(predictions, details, picture, confusion)
    else:
        body.append(text_section(predictions))
    return page.page(title, f"{split} split, {samples:,} samples", body)


def headlines(scores: Results) -> str:
    """The few numbers that say most, each with its interval."""
    names = [name for name in HEADLINES if name in scores]
    items = [(TITLES.get(name, name.replace("_", " ")), number(scores[name]), interval(scores, name)) for name in names]
    return page.tiles([*items, ("loss", number(scores["loss"]), "nats a token or image")])


def scores_section(scores: Results) -> str:
    """All scores, their intervals and controls in a table."""
    names = [name for name in scores if "@" not in name]
    beside = [c for c in CONTROLS if any(f"{name}@{c}" in scores for name in names)]
    header = ["", "model", *(["95% interval"] if any(name.endswith("@low") for name in scores) else [])]
    rows = []
    for name in names:
        row = [TITLES.get(name, name.replace("_", " ")), number(scores[name])]
        row += [interval(scores, name)] if len(header) > 2 else []
        rows.append(row + [number(scores.get(f"{name}@{control}")) for control in beside])
    notes = "Intervals are from 1,000 bootstrap resamples of the samples. " if len(header) > 2 else ""
    if beside:
        notes += "The columns on the right are controls that do not look at the input: a model should beat them."
    table = page.table([*header, *(CONTROLS[control] for control in beside)], rows)
    return page.section("Scores", *([page.paragraph(notes, "soft small")] if notes else []), table)


def _grounding(scores: Results) -> Iterator[str]:
    """Whether the images matter, in a picture and in words."""
    if "loss@shuffled" not in scores:
        return
    losses = {"own image": scores["loss"], "other image": scores["loss@shuffled"]}
    losses |= {"blank image": scores["loss@blank"]} if "loss@blank" in scores else {}
    gap = scores["loss@shuffled"] / max(1e-12, scores["loss"]) - 1
    looks = gap > 0.01
    verdict = f"Beside another image the loss on the same captions changes by {gap:+.0%}: the model "
    verdict += "looks at its image." if looks else "hardly looks at its image."
    facts = [("distinct captions", f"{scores.get('distinct', 0):.0%}", "of all captions")]
    if "length_ratio" in scores:
        facts.append(("caption length", f"{scores['length_ratio']:.2f} x", "that of the references"))
    if "novelty" in scores:
        facts.append(("new captions", f"{scores['novelty']:.0%}", "stand nowhere in train"))
    drawn = charts.bars("loss on the same captions", losses)
    words = page.paragraph(verdict, "good" if looks else "bad")
    yield page.section("Does it look at the image?", words, f'<div class="charts">{drawn}{page.tiles(facts)}</div>')


def curve_charts(curves: Mapping[str, charts.Line]) -> str:
    """Small charts over steps: the losses in one, each other validated metric in its own."""
    losses = ("train/loss", "val/loss", "val/loss@shuffled", "val/loss@blank")
    drawn = [charts.line_chart("loss", {name: curves[name] for name in losses if name in curves})]
    others = [name for name in curves if name.startswith("val/") and "@" not in name and name not in losses]
    drawn += [charts.line_chart(name, {name: curves[name]}) for name in others if name.split("/")[1] in CURVES]
    found = "".join(filter(None, drawn))
    return f'<div class="charts">{found}</div>' if found else ""


def caption_sections(images: Mapping[str, Mapping[str, Any]], picture: Picture) -> Iterator[str]:
    """The best captions, the worst and some at random; by CIDEr, then by ROUGE-L."""
    ranked = sorted(images, key=lambda name: (-images[name]["cider"], -images[name]["rouge_l"], name))
    some = [ranked[at] for at in numpy_rng("report", len(ranked)).permutation(len(ranked))[:SHOWN]]
    count = min(SHOWN, -(-len(ranked) // 2))
    kinds = {"Random captions": some, "Best captions": ranked[:count], "Worst captions": ranked[::-1][:count]}
    for title, names in kinds.items():
        made = (caption_card(name, images[name], picture) for name in names)
        yield page.section(title, page.cards(made))


def attention_section(attention: Sequence[tuple[str, bytes]]) -> Iterator[str]:
    """Where the model looked while it wrote each word."""
    if attention:
        note = "Bright is where the last layer looked when it wrote the word above, on the mean of its heads."
        drawn = [page.picture(page.data_uri(png, "png"), caption) for caption, png in attention]
        yield page.section("Where it looked", page.paragraph(note, "soft small"), *drawn)


def caption_card(name: str, row: Mapping[str, Any], picture: Picture) -> str:
    scores = f"CIDEr {row['cider']:.2f}, ROUGE-L {row['rouge_l']:.2f}"
    scores += f", loss {row['loss']:.2f}" if "loss" in row else ""
    return page.card(_thumbnail(picture, name), row["caption"], [scores, name], row["references"])


def class_sections(
    predictions: Sequence[Mapping[str, Any]], details: Mapping[str, Any], picture: Picture, confusion: bytes | None
) -> Iterator[str]:
    """The confusion matrix, the accuracy of each class, and the surest mistakes beside some samples at random."""
    drawn = [page.picture(page.data_uri(confusion, "png"), "confusion matrix")] if confusion else []
    rows = [(name, "no samples" if value is None else f"{value:.1%}") for name, value in details["accuracy"].items()]
    yield page.section("Classes", *drawn, page.table(["class", "accuracy"], rows))
    wrong = [row for row in predictions if row["predicted"] != row["label"]]
    wrong.sort(key=lambda row: -row["probability"])
    order = numpy_rng("report", len(predictions)).permutation(len(predictions))[:SHOWN]
    kinds = {"Surest mistakes": wrong[:SHOWN], "Random samples": [predictions[at] for at in order]}
    for title, shown in kinds.items():
        if shown:
            yield page.section(title, page.cards(_class_card(row, picture) for row in shown))


def _class_card(row: Mapping[str, Any], picture: Picture) -> str:
    true = "right" if row["predicted"] == row["label"] else f"true: {row['label']}"
    said = f"{row['predicted']} {row['probability']:.0%}"
    return page.card(_thumbnail(picture, row["image"]), said, [true, row["image"]])


def text_section(predictions: Sequence[Mapping[str, Any]]) -> str:
    texts = [page.preformatted(row["prompt"] + row["text"]) for row in predictions]
    return page.section("Samples", *texts)


def _thumbnail(picture: Picture, name: str) -> str | None:
    try:
        image = picture(name)
    except ImageError:
        return None
    return None if image is None else page.thumbnail(image)


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def interval(scores: Results, name: str) -> str:
    if f"{name}@low" not in scores:
        return ""
    return f"{scores[f'{name}@low']:.3f} to {scores[f'{name}@high']:.3f}"


def pictures_of(split: Any) -> Picture:
    """Images of a split by their names, in its first epoch; none where a split has no images."""
    places: dict[str, int] = {}

    def picture(name: str) -> Image.Image | None:
        if not places:
            places.update((record.id, index) for index, record in enumerate(split.records()))
        record = split.record(places[name]) if name in places else None
        return record.image() if record is not None and "image" in record else None

    return picture


def curves_beside(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """The curves of the run whose evaluation a folder is (RUN/evaluation/SPLIT), or that lie in the folder itself."""
    places = [folder / "metrics.csv", folder.resolve().parent.parent / "metrics.csv"]
    return next((curves for place in places if (curves := charts.read_curves(place))), {})
