"""Evaluations as their folders keep them, with what their samples say of a difference between two.

Metrics of training are imported by those that use them: torchmetrics takes longer to import than most comparisons.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from vlm.errors import UserError
from vlm.evaluation.metrics.bootstrap import Scorer, caption_scorer, mean_scorer
from vlm.evaluation.metrics.coco import KEYS, References

Rows = Mapping[str, Mapping[str, Any]]  # what is known of each sample, by its name
Pairs = Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]  # of the samples that two evaluations have
Scorers = tuple[Sequence[str], Scorer, Scorer]  # names of scores, and each side's scores under them


@dataclass
class StoredEvaluation:
    """An evaluation's folder.

    Attributes:
        name: Its name beside the others.
        split: The split.
        scores: By metric, as in metrics.json without the split.
        samples: What is known of them, by language; "" where nobody says the languages.
        scorers: Of two evaluations of such samples.
    """

    name: str
    split: str
    scores: dict[str, float]
    samples: dict[str, Rows]
    scorers: Callable[[Pairs], Scorers]


def read(folder: Path, name: str) -> StoredEvaluation:
    """Reads an evaluation's folder, or the one of the run whose folder is given.

    Raises:
        UserError: There is none, or it is damaged.
    """
    place = next((place for place in places(folder) if (place / "metrics.json").is_file()), None)
    if place is None:
        raise UserError(f"{folder}: holds no metrics.json; give a folder that vlm evaluate --out wrote, or a run's")
    metrics, details, predictions = (_json(place / f"{part}.json") for part in ("metrics", "details", "predictions"))
    try:
        split = next(iter(metrics)).split("/")[0]
        scores = {key.split("/", 1)[1]: float(value) for key, value in metrics.items()}
        samples = _samples(details or {}, predictions or (), scores)
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:
        raise UserError(f"{place}: not what vlm evaluate writes ({error!r}); evaluate again") from error
    return StoredEvaluation(name, split, scores, *samples)


def places(folder: Path) -> list[Path]:
    """Places of an evaluation in a folder."""
    return [folder, *(folder / "evaluation" / split for split in ("test", "val"))]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); evaluate again") from error


def _samples(
    details: Mapping[str, Any], predictions: Sequence[Mapping[str, Any]], scores: Mapping[str, float]
) -> tuple[dict[str, Rows], Callable[[Pairs], Scorers]]:
    """The samples by language, of captions; of anything else under ""."""
    languages = ("", *(name for name in details if f"{KEYS[-1]}_{name}" in scores))
    captions = {name: rows for name in languages if (rows := details.get(name or "images"))}
    if captions:
        return {name: _chosen(rows, "caption", "references") for name, rows in captions.items()}, _of_captions
    if texts := details.get("texts"):
        return {"": _chosen(texts, "translation", "reference")}, _of_translations
    if any("tags" in row for row in predictions):
        return {"": _chosen({row["id"]: row for row in predictions}, "words", "tags", "predicted")}, _of_tags
    return {"": dict(_values(details.get("questions", ()), predictions))}, _of_values


def _chosen(rows: Rows, *names: str) -> Rows:
    return {id: {name: row[name] for name in names} for id, row in rows.items()}


def _values(
    questions: Sequence[Mapping[str, Any]], predictions: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Samples whose scores are means: those of a classifier, images that find texts, and answers."""
    from vlm.evaluation.metrics.retrieval import DEPTHS

    for row in predictions:
        if "label" in row:
            yield row["image" if "image" in row else "id"], {"accuracy": float(row["predicted"] == row["label"])}
        elif "rank" in row:
            yield row["image_id"], {f"text_recall_{depth}": float(row["rank"] <= depth) for depth in DEPTHS}
    for row in questions:
        if "f1" in row:
            yield row["id"], {name: float(row[name]) for name in ("exact_match", "f1")}
        else:
            known = f"{row['image_id']}: {row['question']}"
            yield known, {"accuracy": float(row["predicted"] == row["answer"])}


def _of_captions(pairs: Pairs) -> Scorers:
    _same(pairs, "references", order=False)
    prepared = References({image: one["references"] for image, (one, _) in pairs.items()})
    sides = ({image: pair[side]["caption"] for image, pair in pairs.items()} for side in (0, 1))
    left, right = (caption_scorer(prepared.score(side)) for side in sides)
    return KEYS, left, right


def _of_translations(pairs: Pairs) -> Scorers:
    from vlm.evaluation.metrics.translation import NAMES, TranslationScores

    _same(pairs, "reference")
    references = [one["reference"] for one, _ in pairs.values()]
    left, right = (
        TranslationScores([pair[side]["translation"] for pair in pairs.values()], references).score for side in (0, 1)
    )
    return NAMES, left, right


def _of_tags(pairs: Pairs) -> Scorers:
    from vlm.evaluation.metrics.tagging import NAMES, has_spans, tag_scorer

    _same(pairs, "words")
    _same(pairs, "tags")
    true = [one["tags"] for one, _ in pairs.values()]
    marks = has_spans([*chain.from_iterable(true)])
    left, right = (
        tag_scorer(true, [pair[side]["predicted"] for pair in pairs.values()], marks=marks) for side in (0, 1)
    )
    return NAMES if marks else NAMES[:1], left, right


def _of_values(pairs: Pairs) -> Scorers:
    one, other = next(iter(pairs.values()))
    names = [name for name in one if name in other]
    left, right = (
        mean_scorer(np.array([[pair[side][name] for name in names] for pair in pairs.values()])) for side in (0, 1)
    )
    return names, left, right


def _same(pairs: Pairs, name: str, *, order: bool = True) -> None:
    """Refuses samples whose true values are others in the two evaluations."""
    for sample, (one, other) in pairs.items():
        left, right = (side[name] if order else sorted(side[name]) for side in (one, other))
        if left != right:
            raise UserError(f"{sample}: has other {name} in the two evaluations; evaluate both on the same data")
