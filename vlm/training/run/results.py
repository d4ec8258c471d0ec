"""Writes the results of a task's evaluation to a folder."""

from pathlib import Path

from vlm.evaluation.report.evaluation import Evaluation, pictures_of, write_results
from vlm.training.data_module import Data
from vlm.training.step.task import Task


def save_results(folder: Path, task: Task, results: dict[str, float], data: Data, *, checkpoint: Path) -> None:
    """Writes the results of a task's last evaluation: scores, predictions, details and the report.

    Args:
        folder: Output folder, created if missing.
        results: The scores, named split/metric.
        data: The data module that was evaluated.
        checkpoint: The evaluated checkpoint.
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
        verdict=task.verdict(),
        headlines=task.headlines,
        curves=task.curves,
    )
    write_results(folder, evaluation, picture=pictures_of(data.split(task.evaluation.split)))
