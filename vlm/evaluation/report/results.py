"""Files that an evaluation writes."""

import json
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from vlm.errors import UserError
from vlm.evaluation.report.confusion import confusion_picture
from vlm.evaluation.report.evaluation import Evaluation, Picture, evaluation_page
from vlm.evaluation.report.sections import Confusion
from vlm.io.atomic import file_named_in_errors, write_text


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
