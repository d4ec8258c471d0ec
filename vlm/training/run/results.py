"""The results of an evaluation, as the task states them, in the files of its folder."""

from pathlib import Path
from typing import Any

from vlm.evaluation.report.evaluation import Evaluation, pictures_of
from vlm.evaluation.report.results import write_results
from vlm.training.step.task import Task


def keep_results(folder: Path, task: Task, results: dict[str, float], data: Any, *, checkpoint: Path) -> None:
    """Writes what a task makes of its last evaluation: scores, predictions, details and the report.

    Args:
        folder: Their place; it is made.
        results: The scores as split/metric.
        data: The data module that was evaluated.
        checkpoint: What was evaluated.
    Raises:
        OSError: A file cannot be written.
    """
    name = (task.name or type(task).__name__).replace("_", " ").capitalize()
    evaluation = Evaluation(
        title=f"{name}: {data.source.name or type(data.source).__name__}",
        task=task.name,
        split=task.evaluation.split,
        used=task.evaluation.used,
        remark=task.remark,
        results=results,
        checkpoint=checkpoint,
        predictions=task.predictions(),
        details=task.details(),
        sections=task.report(),
        findings=task.findings(),
        headlines=task.headlines,
        curves=task.curves,
    )
    write_results(folder, evaluation, picture=pictures_of(data.split(task.evaluation.split)))
