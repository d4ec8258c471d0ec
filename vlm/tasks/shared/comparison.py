"""Evaluations as their folders store them, and what `vlm compare` compares of each task."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vlm.checkpoint.locate import find_best_checkpoint
from vlm.errors import UserError, print_error, printable
from vlm.evaluation.metrics.bootstrap import Scorer, caption_scorer, mean_scorer, ratio_scorer
from vlm.evaluation.metrics.coco import KEYS, References
from vlm.inference.tasks import TASKS, current_task_name, import_object
from vlm.io.terminal import shell_line

DEPTHS = (1, 5, 10)  # ranks up to which a recall counts a caption or image as found


class SampleFiles(NamedTuple):
    """The content of an evaluation's details.json and predictions.json, whose keys depend on the task."""

    details: Mapping[str, Any]
    predictions: Sequence[Mapping[str, Any]]


class Sample(NamedTuple):
    """True value of a sample, such as its references, and the predicted one or its scores."""

    true: Any
    predicted: Any


Samples = Mapping[str, Sample]  # by name


class ComparedSamples(NamedTuple):
    """The samples that a task compares, and their scoring.

    Args:
        samples: By language; under "" if the languages are unknown.
        scoring: Returns the names of scores, and the scores, of some samples.
    """

    samples: Mapping[str, Samples]
    scoring: Callable[[Sequence[Sample]], tuple[Sequence[str], Scorer]] | None


@dataclass
class StoredEvaluation:
    """An evaluation's folder.

    Attributes:
        name: Its name in the comparison.
        split: The split.
        scores: By metric, as in metrics.json without the split.
        compared: Its samples; none if the task compares none, or the folder does not name it.
        task: The task; None if the folder does not name it.
        checkpoint: The checkpoint whose stored validation these scores are; None for an evaluation's folder.
    """

    name: str
    split: str
    scores: dict[str, float]
    compared: ComparedSamples
    task: str | None = None
    checkpoint: Path | None = None

    def is_comparable(self, evaluation: "StoredEvaluation") -> bool:
        """Returns True if two evaluations are of one task, of tasks with the same scores, or of unknown ones."""
        if self.task is None or evaluation.task is None or self.task == evaluation.task:
            return True
        compared = [TASKS[task].comparison for task in (self.task, evaluation.task) if task in TASKS]
        return len(compared) == 2 and compared[0] is not None and compared[0] == compared[1]


def read(folder: Path, name: str) -> StoredEvaluation:
    """Reads the folder of an evaluation, or that of a run's evaluation.

    Raises:
        UserError: There is none, or it is damaged.
    """
    place = next((place for place in places(folder) if (place / "metrics.json").is_file()), None)
    if place is None:
        return _validation(folder, name)
    parts: dict[str, Any] = dict.fromkeys(("metrics", "details", "predictions", "about"))
    for path in (path for part in parts if (path := place / f"{part}.json").is_file()):
        try:
            parts[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read ({error}); evaluate again") from error
    if parts["about"] is None and (parts["details"] or parts["predictions"]):
        warning = f"{place}: has no about.json, which names the task; its scores are compared, not its samples"
        print_error(printable(warning), "warning")
    try:
        split = next(iter(parts["metrics"])).split("/")[0]
        scores = {key.split("/", 1)[1]: float(value) for key, value in parts["metrics"].items()}
        stored_name = (parts["about"] or {}).get("task")
        task_name = None if stored_name is None else current_task_name(stored_name)
        compared, task = ComparedSamples({}, None), TASKS.get(task_name or "")
        if task and task.comparison:
            compared = import_object(task.comparison)(SampleFiles(parts["details"] or {}, parts["predictions"] or ()))
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:
        raise UserError(f"{place}: not what vlm evaluate writes ({error!r}); evaluate again") from error
    return StoredEvaluation(name, split, scores, compared, task_name)


def _validation(folder: Path, name: str) -> StoredEvaluation:
    """Reads the scores of a run that was not tested: those of the validation of its best checkpoint.

    Raises:
        UserError: The folder is not one of a run, or the run was not validated.
    """
    checkpoint = find_best_checkpoint(folder)
    if checkpoint == folder:
        raise UserError(f"{folder}: holds no metrics.json; give a folder that vlm evaluate --out wrote, or a run's")
    from vlm.checkpoint.load import read as read_checkpoint  # torch

    about = read_checkpoint(checkpoint, merge=False)["vlm"]
    results = about.get("scores") or {}
    if not results:
        command = shell_line(["vlm", "evaluate", "-c", str(checkpoint), "--split", "val", "--out", "DIR"])
        raise UserError(f"{folder}: was neither tested nor validated; compare the output folder of: {command}")
    split = next(iter(results)).split("/")[0]
    scores = {key.split("/", 1)[1]: float(value) for key, value in results.items()}
    task_name = current_task_name(about["task"])
    return StoredEvaluation(name, split, scores, ComparedSamples({}, None), task_name, checkpoint)


def places(folder: Path) -> list[Path]:
    """Returns the places where a folder may hold an evaluation."""
    return [folder, *(folder / "evaluation" / split for split in ("test", "val"))]


def _score_shares(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    """Returns the scorer of the share of right answers, classes or tokens, given (right, all) of each sample."""
    return ("accuracy",), ratio_scorer(np.array([sample.predicted for sample in samples], np.float64))


def _score_means(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    """Returns the scorer of means, given scores by name of each sample."""
    values = np.array([[*sample.predicted.values()] for sample in samples], np.float64)
    return [*samples[0].predicted], mean_scorer(values)


def select_captions(files: SampleFiles) -> ComparedSamples:
    """Returns the captions, by language if the data have languages."""
    samples = {
        "" if language == "images" else language: {
            image: Sample(sorted(row["references"]), row["caption"]) for image, row in rows.items()
        }
        for language, rows in files.details.items()
        if rows
    }
    return ComparedSamples(samples, _score_captions)


def _score_captions(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    by_name = {f"{place:09}": sample for place, sample in enumerate(samples)}  # in sorted order
    references = References({name: sample.true for name, sample in by_name.items()})
    return KEYS, caption_scorer(references.score({name: sample.predicted for name, sample in by_name.items()}))


def select_classes(files: SampleFiles) -> ComparedSamples:
    """Returns whether the predicted classes are right."""
    rows = {row.get("image", row.get("id")): row for row in files.predictions}
    samples = {name: Sample(row["label"], (row["label"] == row["predicted"], 1)) for name, row in rows.items()}
    return ComparedSamples({"": samples}, _score_shares)


def select_ranks(files: SampleFiles) -> ComparedSamples:
    """Returns the recalls of each image's caption, given its rank."""
    samples = {}
    for row in files.predictions:
        recalls = {f"text_recall_{depth}": row["rank"] <= depth for depth in DEPTHS}
        samples[row["image_id"]] = Sample(None, recalls)
    return ComparedSamples({"": samples}, _score_means)


def select_image_answers(files: SampleFiles) -> ComparedSamples:
    """Returns the answers to all questions of an image as one sample, because they are correlated."""
    answers: dict[str, list[str]] = {}
    right: Counter[str] = Counter()
    for row in files.details.get("questions", ()):
        answers.setdefault(row["image_id"], []).append(row["answer"])
        right[row["image_id"]] += row["predicted"] in (row["answer"], *row.get("answers", ()))
    samples = {image: Sample(true, (right[image], len(true))) for image, true in answers.items()}
    return ComparedSamples({"": samples}, _score_shares)


def select_detections(files: SampleFiles) -> ComparedSamples:
    """Returns the objects found in each image."""
    samples = {}
    for image, row in files.details.get("images", {}).items():
        truth = [(item["label"], tuple(item["box"]), item["crowd"]) for item in row["objects"]]
        found = [(item["label"], tuple(item["box"]), item["score"]) for item in row["found"]]
        samples[image] = Sample((tuple(row["size"]), truth), found)
    return ComparedSamples({"": samples}, _score_detections)


def _score_detections(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    from vlm.data.boxes import ImageBoxes, LabeledBox  # torch
    from vlm.evaluation.metrics.average_precision import NAMES, match_classes, precision_scorer

    truths = [ImageBoxes.of_plain(sample.true) for sample in samples]
    found = [[(LabeledBox(label, box), score) for label, box, score in sample.predicted] for sample in samples]
    return NAMES, precision_scorer(match_classes(truths, found))


def select_drawings(files: SampleFiles) -> ComparedSamples:
    """Returns in which pictures each judge finds the caption."""
    samples = {}
    for id, row in files.details.get("pictures", {}).items():
        samples[id] = Sample(row["caption"], {judge: float(match) for judge, match in row["matches"].items()})
    return ComparedSamples({"": samples}, _score_means)


def select_masked_words(files: SampleFiles) -> ComparedSamples:
    """Returns the right tokens of each text's gaps, which differ between models with different tokenizers."""
    samples = {}
    for row in files.predictions:
        if "true" in row:  # earlier versions did not store the true tokens
            hits = [true == token for true, token in zip(row["true"], row["predicted"], strict=True)]
            samples[row["id"]] = Sample(row["text"], (sum(hits), len(hits)))
    return ComparedSamples({"": samples}, _score_shares)


def select_span_answers(files: SampleFiles) -> ComparedSamples:
    """Returns the scores of each question's answer."""
    samples = {}
    for row in files.details.get("questions", ()):
        samples[row["id"]] = Sample(row.get("answers"), {name: row[name] for name in ("exact_match", "f1")})
    return ComparedSamples({"": samples}, _score_means)


def select_tags(files: SampleFiles) -> ComparedSamples:
    """Returns the tags of each sentence."""
    samples = {row["id"]: Sample((row["words"], row["tags"]), row["predicted"]) for row in files.predictions}
    return ComparedSamples({"": samples}, _score_tags)


def _score_tags(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    from vlm.tasks.tagging.metrics import NAMES, find_scheme, tag_scorer  # torchmetrics takes long to import

    true = [tags for (_, tags), _ in samples]
    scheme = find_scheme({tag for tags in true for tag in tags})
    return NAMES, tag_scorer(true, [sample.predicted for sample in samples], scheme)


def select_translations(files: SampleFiles) -> ComparedSamples:
    """Returns the translations."""
    texts = files.details.get("texts", {})
    samples = {name: Sample(row["reference"], row["translation"]) for name, row in texts.items()}
    return ComparedSamples({"": samples}, _score_translations)


def _score_translations(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    from vlm.evaluation.metrics.texts import NAMES, TextScores  # sacreBLEU takes long to import

    true, predicted = zip(*samples, strict=True)
    return NAMES, TextScores(predicted, true).score
