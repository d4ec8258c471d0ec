"""The files that an evaluation leaves in its folder."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vlm.atomic import named, write_text
from vlm.evaluation.report.confusion import confusion_picture
from vlm.evaluation.report.evaluation import curves_beside, evaluation_page, pictures_of
from vlm.inference.attention import word_maps
from vlm.inference.attention_picture import attention_picture
from vlm.tasks.captioning import Captioning
from vlm.training.task import Task


def write_results(folder: Path, task: Task, results: dict[str, float], data: Any) -> None:
    """Writes metrics.json, predictions.json, report.html and, where the task has any, details.json and their picture.

    Args:
        folder: Where to; it is made.
        task: What was evaluated, as the evaluation left it.
        results: The scores as split/metric.
        data: The data that it was evaluated on, for the report's images.
    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    details, predictions = task.details(), task.predictions()
    files = {"metrics": results, "predictions": predictions, **({"details": details} if details else {})}
    for name, content in files.items():
        write_text(folder / f"{name}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    confusion = None
    if "confusion" in details:
        with named(folder / "confusion.png") as path:
            confusion_picture(np.array(details["confusion"]), details["classes"], str(path))
            confusion = path.read_bytes()
    split, name = task.test_split, str(getattr(task, "name", "evaluation"))
    text = evaluation_page(
        title=f"{name.replace('_', ' ').capitalize()}: {_source(data)}",
        split=split,
        results=results,
        predictions=predictions,
        details=details,
        picture=pictures_of(data.split(split)),
        confusion=confusion,
        curves=curves_beside(folder),
        attention=list(attention_of(task)),
    )
    write_text(folder / "report.html", text)


def attention_of(task: Task, shown: int = 3) -> Iterator[tuple[str, bytes]]:
    """Captions of an evaluation with pictures of where the model looked; none for other tasks."""
    if not isinstance(task, Captioning):
        return
    for sample in task.samples[:shown]:
        pixels = sample["image"].to(task.device)
        maps = word_maps(task.model, task.tokenizer, task.preprocess, pixels, sample["caption"])
        if maps:
            yield sample["caption"], attention_picture(pixels, maps)


def _source(data: Any) -> str:
    source = getattr(data, "source", data)
    return getattr(source, "name", type(source).__name__)
