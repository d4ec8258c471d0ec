"""Evaluations as their folders keep them, with what their samples say of a difference between two.

Metrics of training are imported by those that use them: torchmetrics takes longer to import than most comparisons.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlm.errors import UserError
from vlm.evaluation.metrics.bootstrap import Scorer, caption_scorer, mean_scorer, ratio_scorer
from vlm.evaluation.metrics.coco import KEYS, References


class Sample(NamedTuple):
    """True value of a sample, such as its references, and the predicted one."""

    true: Any
    predicted: Any


Samples = Mapping[str, Sample]  # by name
Scoring = Callable[[Sequence[Sample]], tuple[Sequence[str], Scorer]]  # names of scores, and the scores


@dataclass
class StoredEvaluation:
    """An evaluation's folder.

    Attributes:
        name: Its name beside the others.
        split: The split.
        scores: By metric, as in metrics.json without the split.
        samples: By language; "" where nobody says the languages.
        scoring: Of samples of this kind.
    """

    name: str
    split: str
    scores: dict[str, float]
    samples: dict[str, Samples]
    scoring: Scoring


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
) -> tuple[dict[str, Samples], Scoring]:
    """The samples by language, of captions; of anything else under ""; and what scores them."""
    languages = ("", *(name for name in details if f"{KEYS[-1]}_{name}" in scores))
    if captions := {name: rows for name in languages if (rows := details.get(name or "images"))}:
        return {name: _named(rows, _caption) for name, rows in captions.items()}, _captions
    if texts := details.get("texts"):
        return {"": _named(texts, lambda row: Sample(row["reference"], row["translation"]))}, _translations
    if questions := details.get("questions"):
        if "f1" in questions[0]:
            rows = {row["id"]: row for row in questions}
            return {"": _named(rows, lambda row: Sample(row.get("answers"), (row["exact_match"], row["f1"])))}, _spans
        images: dict[str, list[Any]] = {}
        for row in questions:
            images.setdefault(row["image_id"], []).append(row)
        return {"": {image: _answers(rows) for image, rows in images.items()}}, _shares
    rows = {row.get("image_id", row.get("image", row.get("id"))): row for row in predictions}
    if any("tags" in row for row in predictions):
        return {"": _named(rows, lambda row: Sample((row["words"], row["tags"]), row["predicted"]))}, _tags
    if any("rank" in row for row in predictions):
        return {"": _named(rows, lambda row: Sample(None, row["rank"]))}, _ranks
    classes = {name: row for name, row in rows.items() if "label" in row}
    return {"": _named(classes, lambda row: Sample([row["label"]], [row["predicted"]]))}, _shares


def _named(rows: Mapping[str, Any], sample: Callable[[Mapping[str, Any]], Sample]) -> Samples:
    return {name: sample(row) for name, row in rows.items()}


def _caption(row: Mapping[str, Any]) -> Sample:
    return Sample(sorted(row["references"]), row["caption"])


def _answers(rows: Sequence[Mapping[str, Any]]) -> Sample:
    """The answers to the questions of an image, which are no samples by themselves: they are alike."""
    return Sample([row["answer"] for row in rows], [row["predicted"] for row in rows])


def _captions(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    names = [f"{place:09}" for place in range(len(samples))]  # which are sorted
    references = References(dict(zip(names, (sample.true for sample in samples), strict=True)))
    captions = dict(zip(names, (sample.predicted for sample in samples), strict=True))
    return KEYS, caption_scorer(references.score(captions))


def _translations(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    from vlm.tasks.translation.metrics import NAMES, TranslationScores

    true, predicted = zip(*samples, strict=True)
    return NAMES, TranslationScores(predicted, true).score


def _tags(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    from vlm.tasks.tagging.metrics import NAMES, tag_scorer

    return NAMES, tag_scorer([tags for (_, tags), _ in samples], [sample.predicted for sample in samples])


def _spans(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    return ("exact_match", "f1"), mean_scorer(np.array([sample.predicted for sample in samples], np.float64))


def _ranks(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    from vlm.tasks.contrastive.metrics import DEPTHS

    hits = np.array([[sample.predicted <= depth for depth in DEPTHS] for sample in samples], np.float64)
    return [f"text_recall_{depth}" for depth in DEPTHS], mean_scorer(hits)


def _shares(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    """Share of right answers, or classes, of resampled images or texts."""
    right = [[one == other for one, other in zip(true, predicted, strict=True)] for true, predicted in samples]
    counts = np.array([(sum(hits), len(hits)) for hits in right], np.float64)
    return ("accuracy",), ratio_scorer(counts)
