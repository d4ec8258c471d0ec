"""Files that an evaluation writes."""

import json
from pathlib import Path
from typing import Any

from vlm.evaluation.report.confusion import confusion_picture
from vlm.evaluation.report.evaluation import Evaluation, Picture, evaluation_page
from vlm.evaluation.report.sections import Confusion
from vlm.io.atomic import file_named_in_errors, write_text


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
    files |= {"about": {"task": evaluation.task}} if evaluation.task else {}
    files |= {"details": evaluation.details} if evaluation.details else {}
    for name, content in files.items():
        write_text(folder / f"{name}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    for part in (part for section in evaluation.sections for part in section.parts if isinstance(part, Confusion)):
        with file_named_in_errors(folder / "confusion.png") as path:
            path.write_bytes(confusion_picture(part))
    write_text(folder / "report.html", evaluation_page(evaluation, picture=picture))
