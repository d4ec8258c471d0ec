"""Evaluations as their folders store them, and what `vlm compare` compares of each task."""

import json
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


class Sample(NamedTuple):
    """True value of a sample, such as its references, and the predicted one."""

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
    parts = {part: _json(place / f"{part}.json") for part in ("metrics", "details", "predictions", "about")}
    if parts["about"] is None and (parts["details"] or parts["predictions"]):
        warning = f"{place}: has no about.json, which names the task; its scores are compared, not its samples"
        print_error(printable(warning), "warning")
    try:
        split = next(iter(parts["metrics"])).split("/")[0]
        scores = {key.split("/", 1)[1]: float(value) for key, value in parts["metrics"].items()}
        stored_task = (parts["about"] or {}).get("task")
        task = TASKS.get(current_task_name(stored_task))
        select = (
            import_object(task.comparison)
            if task and task.comparison
            else lambda details, predictions: ComparedSamples({}, None)
        )
        compared = select(parts["details"] or {}, parts["predictions"] or ())
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:
        raise UserError(f"{place}: not what vlm evaluate writes ({error!r}); evaluate again") from error
    return StoredEvaluation(
        name, split, scores, compared, None if stored_task is None else current_task_name(stored_task)
    )


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
        raise UserError(f"{folder}: was neither tested nor validated; compare what this writes: {command}")
    split = next(iter(results)).split("/")[0]
    scores = {key.split("/", 1)[1]: float(value) for key, value in results.items()}
    return StoredEvaluation(
        name, split, scores, ComparedSamples({}, None), current_task_name(about["task"]), checkpoint
    )


def places(folder: Path) -> list[Path]:
    """Returns the places where a folder may hold an evaluation."""
    return [folder, *(folder / "evaluation" / split for split in ("test", "val"))]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); evaluate again") from error


def score_shares(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    """Returns the scorer of the share of right answers or classes, for resampled images or texts."""
    right = [
        [expected == answer for expected, answer in zip(true, predicted, strict=True)] for true, predicted in samples
    ]
    return ("accuracy",), ratio_scorer(np.array([(sum(hits), len(hits)) for hits in right], np.float64))


def select_captions(details: Mapping[str, Any], predictions: Any) -> ComparedSamples:
    """Returns the captions, by language if the data have languages."""
    by_language = {"" if name == "images" else name: rows for name, rows in details.items() if rows}
    return ComparedSamples(
        {
            language: {image: Sample(sorted(row["references"]), row["caption"]) for image, row in rows.items()}
            for language, rows in by_language.items()
        },
        _score_captions,
    )


def _score_captions(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    names = [f"{place:09}" for place in range(len(samples))]  # in sorted order
    references = References(dict(zip(names, (sample.true for sample in samples), strict=True)))
    captions = dict(zip(names, (sample.predicted for sample in samples), strict=True))
    return KEYS, caption_scorer(references.score(captions))


def select_classes(details: Any, predictions: Sequence[Mapping[str, Any]]) -> ComparedSamples:
    """Returns the predicted classes."""
    samples = {row.get("image", row.get("id")): Sample([row["label"]], [row["predicted"]]) for row in predictions}
    return ComparedSamples({"": samples}, score_shares)


def select_ranks(details: Any, predictions: Sequence[Mapping[str, Any]]) -> ComparedSamples:
    """Returns the rank of each image's caption."""
    return ComparedSamples({"": {row["image_id"]: Sample(None, row["rank"]) for row in predictions}}, _score_ranks)


def _score_ranks(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    from vlm.tasks.contrastive.metrics import DEPTHS  # torchmetrics takes long to import

    hits = np.array([[sample.predicted <= depth for depth in DEPTHS] for sample in samples], np.float64)
    return [f"text_recall_{depth}" for depth in DEPTHS], mean_scorer(hits)


def select_image_answers(details: Mapping[str, Any], predictions: Any) -> ComparedSamples:
    """Returns the answers to all questions of an image as one sample, because they are correlated."""
    images: dict[str, tuple[list[str], list[str]]] = {}
    for row in details.get("questions", ()):
        true, predicted = images.setdefault(row["image_id"], ([], []))
        true.append(row["answer"])
        predicted.append(row["answer"] if row["predicted"] in row.get("answers", ()) else row["predicted"])
    return ComparedSamples({"": {image: Sample(*answers) for image, answers in images.items()}}, score_shares)


def select_masked_words(details: Any, predictions: Sequence[Mapping[str, Any]]) -> ComparedSamples:
    """Returns the tokens of each text's gaps, which differ between models with different tokenizers."""
    rows = [row for row in predictions if "true" in row]  # earlier versions did not store the true tokens
    return ComparedSamples(
        {"": {row["id"]: Sample(row["text"], (row["true"], row["predicted"])) for row in rows}}, _score_masked_words
    )


def _score_masked_words(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    hits = [[expected == token for expected, token in zip(*sample.predicted, strict=True)] for sample in samples]
    return ("accuracy",), ratio_scorer(np.array([[sum(hit), len(hit)] for hit in hits], np.float64))


def select_span_answers(details: Mapping[str, Any], predictions: Any) -> ComparedSamples:
    """Returns the scores of each question's answer."""
    rows = details.get("questions", ())
    samples = {row["id"]: Sample(row.get("answers"), (row["exact_match"], row["f1"])) for row in rows}
    return ComparedSamples({"": samples}, _score_span_answers)


def _score_span_answers(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    return ("exact_match", "f1"), mean_scorer(np.array([sample.predicted for sample in samples], np.float64))


def select_tags(details: Any, predictions: Sequence[Mapping[str, Any]]) -> ComparedSamples:
    """Returns the tags of each sentence."""
    samples = {row["id"]: Sample((row["words"], row["tags"]), row["predicted"]) for row in predictions}
    return ComparedSamples({"": samples}, _score_tags)


def _score_tags(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    from vlm.tasks.tagging.metrics import NAMES, find_scheme, tag_scorer  # torchmetrics takes long to import

    true = [tags for (_, tags), _ in samples]
    scheme = find_scheme({tag for tags in true for tag in tags})
    return NAMES, tag_scorer(true, [sample.predicted for sample in samples], scheme)


def select_translations(details: Mapping[str, Any], predictions: Any) -> ComparedSamples:
    """Returns the translations."""
    texts = details.get("texts", {})
    samples = {name: Sample(row["reference"], row["translation"]) for name, row in texts.items()}
    return ComparedSamples({"": samples}, _score_translations)


def _score_translations(samples: Sequence[Sample]) -> tuple[Sequence[str], Scorer]:
    from vlm.evaluation.metrics.texts import NAMES, TextScores  # sacreBLEU takes long to import

    true, predicted = zip(*samples, strict=True)
    return NAMES, TextScores(predicted, true).score
